"""What the relay of a pool reads from Kafka: the profiles and records of the replicas that name the pool's blocks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import FrameError, ProfileError
from schemas.events import Record, decode_record
from schemas.profiles import Profile, decode_entry
from schemas.topics import REPLICAS, events_topic

log = structlog.get_logger()

_PAUSE_S = 1.0
_AT_ONCE = 500  # records


class Follower:
    """Reads `kv.replicas`, then the models' events, all from their beginning and on; goes on where it was after errors.

    What a record says twice is learnt once, so nothing is committed anywhere.
    """

    def __init__(
        self,
        client: Mapping[str, Any],
        models: Sequence[str],
        *,
        on_profile: Callable[[Profile], None],
        on_record: Callable[[str, Record], None],
        on_caught_up: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            models: whose events are followed; `on_record` gets the model with each record.
            on_caught_up: all that was there at the start has been read; called again after errors.
        """
        self._client = client
        self._models = {events_topic(model): model for model in models}
        self._on_profile = on_profile
        self._on_record = on_record
        self._on_caught_up = on_caught_up
        self._positions: dict[TopicPartition, int] = {}

    async def run(self) -> None:
        """Follow until cancelled; a broker that is away, or a topic that is not made yet, is waited for."""
        while True:
            consumer = AIOKafkaConsumer(
                REPLICAS,
                *self._models,
                **self._client,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                max_poll_records=_AT_ONCE,
            )
            try:
                await consumer.start()
                await self._follow(consumer)
            except (KafkaError, OSError) as error:
                log.warning("relay.records_unavailable", error=str(error), pause_s=_PAUSE_S)
            finally:
                await consumer.stop()
            await asyncio.sleep(_PAUSE_S)

    async def _follow(self, consumer: AIOKafkaConsumer) -> None:
        partitions = consumer.assignment()
        for partition, position in self._positions.items():
            if partition in partitions:
                consumer.seek(partition, position)
        # profiles first: they say which replicas' names are the pool's
        events = {partition for partition in partitions if partition.topic != REPLICAS}
        consumer.pause(*events)
        await self._read_to_end(consumer, partitions - events)
        consumer.resume(*events)
        await self._read_to_end(consumer, partitions)
        self._on_caught_up()
        while True:
            await self._read_some(consumer)

    async def _read_to_end(self, consumer: AIOKafkaConsumer, partitions: Set[TopicPartition]) -> None:
        """Read what is there now; the last offsets may be markers, or compacted away: positions tell."""
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            await self._read_some(consumer)

    async def _read_some(self, consumer: AIOKafkaConsumer) -> None:
        for partition, records in (await consumer.getmany(timeout_ms=1000)).items():
            for record in records:
                self._take(partition.topic, record)
                self._positions[partition] = record.offset + 1
            await asyncio.sleep(0)

    def _take(self, topic: str, record: "ConsumerRecord[bytes, bytes]") -> None:
        if record.value is None:
            return
        try:
            if topic == REPLICAS:
                self._on_profile(decode_entry(record.value).profile)
            else:
                self._on_record(self._models[topic], decode_record(record.value))
        except (FrameError, ProfileError) as error:
            log.warning("relay.record_refused", topic=topic, offset=record.offset, error=str(error))
