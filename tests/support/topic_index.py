"""What the records of a model's topic amount to, folded in this process by the reference store, or by another."""

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition

from index.fold import Flush, fold
from index.memory_store import MemoryStore
from index.store import HolderRow, Store
from schemas.events import Heartbeat, Record, decode_record
from schemas.profiles import Holder
from schemas.topics import events_topic


class TopicIndex:
    """Reads a model's events from their beginning on."""

    def __init__(self, brokers: str, model: str, partitions: int, store: Store | None = None) -> None:
        self.records: list[Record] = []
        self._brokers = brokers
        self._model = model
        self._partitions = [TopicPartition(events_topic(model), number) for number in range(partitions)]
        self._store = store or MemoryStore(time.monotonic)
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to read."""
        await self._store.setup(self._model)
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._brokers, enable_auto_commit=False, auto_offset_reset="earliest"
        )
        await self._consumer.start()
        self._consumer.assign(self._partitions)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        await self._consumer.stop()

    async def row(self, name: str, rank: int = 0) -> HolderRow | None:
        """Return what is known of a holder."""
        rows = await self._store.holders(self._model)
        return next((row for row in rows if row.holder == Holder(name, rank)), None)

    async def digest(self, name: str, rank: int = 0) -> int:
        """Return a holder's index digest."""
        return await self._store.digest(self._model, Holder(name, rank))

    def beats(self, name: str) -> list[Record]:
        """Return the heartbeats of a replica so far."""
        return [r for r in self.records if r.name == name and r.events and isinstance(r.events[-1], Heartbeat)]

    async def _read(self) -> None:
        async for message in self._consumer:
            record = decode_record(message.value)
            self.records.append(record)
            await self._store.apply(Flush(self._model, None, fold([record])))
