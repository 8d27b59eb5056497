"""A small Faust app on the guarded transport (or, to compare, on Faust's), whose agent acknowledges as told."""

import asyncio
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import faust
from aiokafka.admin import AIOKafkaAdminClient
from faust.types import TP

from streams.transport import guard, lags
from tests.support.waiting import until


class Outside(NamedTuple):
    """A cursor that lay outside the log."""

    partition: int
    cursor: int | None
    first: int
    end: int


class GuardedApp:
    """Takes a topic's records; those that `holds` names are acknowledged only when it stops."""

    def __init__(
        self,
        brokers: str,
        topic: str,
        *,
        cursors: dict[int, int] | None = None,
        holds: Callable[[int, int], bool] = lambda partition, offset: False,
        guarded: bool = True,
    ) -> None:
        self.taken: list[tuple[int, int]] = []  # partition, offset
        self.outside: list[Outside] = []
        self.back: list[tuple[int, int, int]] = []  # partition, offset, expected
        self.group = f"group-of-{topic}"
        self._brokers = brokers
        self._held: list[Any] = []
        self._holds = holds
        app = self._app = faust.App(
            self.group,
            broker=f"kafka://{brokers}",
            autodiscover=False,
            datadir=tempfile.gettempdir() + "/kvatlas-faust",
            topic_disable_leader=True,
            topic_allow_declare=False,
            processing_guarantee="at_least_once",
            broker_commit_interval=0.1,
            consumer_auto_offset_reset="earliest",
            consumer_metadata_max_age_ms=30_000,
            web_enabled=False,
        )

        async def load_cursors(partitions: set[TP]) -> dict[TP, int]:
            return {tp: cursors[tp.partition] for tp in partitions if cursors and tp.partition in cursors}

        if guarded:
            guard(
                app,
                load_cursors,
                lambda tp, cursor, first, end: self.outside.append(Outside(tp.partition, cursor, first, end)),
                lambda tp, offset, expected: self.back.append((tp.partition, offset, expected)),
            )
        source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
        app.agent(source, name=f"take {topic}", concurrency=1)(self._take)

    async def __aenter__(self) -> Self:
        """Start; returns when it is assigned its partitions."""
        self._app.finalize()
        await self._app.start()
        await until(lambda: bool(self._app.consumer.assignment()), 30.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Acknowledge what was held, and stop."""
        for event in self._held:
            event.ack()
        async with asyncio.timeout(30.0):
            await self._app.stop()

    async def committed(self) -> dict[int, int]:
        """Return partition -> offset that Kafka has as committed."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self._brokers)
        await admin.start()
        try:
            offsets = await admin.list_consumer_group_offsets(self.group)
        finally:
            await admin.close()
        return {tp.partition: meta.offset for tp, meta in offsets.items()}

    def waiting(self) -> dict[int, int]:
        """Return partition -> records that are not acknowledged."""
        return {tp.partition: waiting for tp, waiting in lags(self._app).items()}

    async def reset(self, offset: int) -> None:
        """Let the consumer jump, as it does where its position is none of the log's."""
        for tp in self._app.consumer.assignment():
            await self._app.consumer._seek(tp, offset)

    async def _take(self, stream: Any) -> None:
        async for events in stream.noack_take(50, within=0.02):
            for event in events:
                message = event.message
                self.taken.append((message.partition, message.offset))
                if self._holds(message.partition, message.offset):
                    self._held.append(event)
                else:
                    await stream.ack(event)
