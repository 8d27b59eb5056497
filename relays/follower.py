"""What the relay of a pool reads from Kafka: the profiles and records of the replicas that name the pool's blocks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
                **self._client, enable_auto_commit=False, auto_offset_reset="earliest", max_poll_records=_AT_ONCE
            )
            try:
                await consumer.start()
                # profiles first: they say which replicas' names are the pool's
                await self._read(consumer, await _partitions(consumer, [REPLICAS]), to_the_end=True)
                partitions = await _partitions(consumer, [REPLICAS, *self._models])
                await self._read(consumer, partitions, to_the_end=True)
                self._on_caught_up()
                await self._read(consumer, partitions, to_the_end=False)
            except (KafkaError, OSError) as error:
                log.warning("relay.broker_unavailable", error=str(error), pause_s=_PAUSE_S)
            finally:
                await consumer.stop()
            await asyncio.sleep(_PAUSE_S)

    async def _read(
        self, consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition], *, to_the_end: bool
    ) -> None:
        consumer.assign(partitions)
        for partition in partitions:
            known = self._positions.get(partition)
            if known is None:
                await consumer.seek_to_beginning(partition)
            else:
                consumer.seek(partition, known)
        ends = await consumer.end_offsets(partitions) if to_the_end else {}
        while not to_the_end or any([await consumer.position(p) < end for p, end in ends.items()]):
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


async def _partitions(consumer: AIOKafkaConsumer, topics: Sequence[str]) -> list[TopicPartition]:
    """Return all partitions of these topics, once they exist."""
    while True:
        await consumer.topics()
        found = {topic: consumer.partitions_for_topic(topic) for topic in topics}
        if all(found.values()):
            return [TopicPartition(topic, number) for topic in topics for number in sorted(found[topic] or ())]
        log.warning("stream.topic_missing", topics=[topic for topic, numbers in found.items() if not numbers])
        await asyncio.sleep(_PAUSE_S)
