"""Recorded engine traffic through relays, Kafka, workers and Redis while things go wrong: the index ends equal."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from index.digests import index_digest
from index.redis_store import RedisStore
from ops.kafka_client import client_options
from ops.replay.capture import Capture, load_capture
from ops.replay.recordings import settings_of
from ops.replay.stack import Player
from ops.stack import Stack
from relays.engine import EngineRank
from relays.process import Relay, RelayConfig, profile_of
from schemas.profiles import Holder, Rank
from schemas.topics import events_topic, model_slug, topic_specs
from streams.topics import create_topics
from tests.support.bench import DEADLINE_S, FAST, StoreIndex
from tests.support.captures import long_recordings, short_recordings
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PARTITIONS = 4
SMALL = {"0.12.0-plain", "0.14.1-offload", "0.25.1-plain", "0.32.0-plain", "0.32.0-swa-gemma3", "0.32.0-offload-simple"}


class Recorded:
    """A recorded engine on real sockets, and a mirror of it in this process."""

    def __init__(self, capture: Capture, model: str, player: Player) -> None:
        self.frames = [(int.from_bytes(frame.parts[1], "big"), frame.parts[2]) for frame in capture.published]
        self.holder = Holder(capture.name, capture.rank)
        self.player = player
        self.config = RelayConfig(
            model=model,
            replica=capture.name,
            engine=capture.engine,
            version=capture.version,
            ranks=(Rank(self.holder.rank or 0, player.events, player.replay),),
            settings=settings_of(capture),
        )
        self.mirror = EngineRank(profile_of(self.config), self.holder, 1)

    async def play(self, part: int, parts: int) -> None:
        """Publish a part of the recording, every message twice."""
        size = -(-len(self.frames) // parts)
        for sequence, payload in self.frames[part * size : (part + 1) * size]:
            self.mirror.take(sequence, payload)
            for _ in range(2):
                await self.player.play(sequence, payload)
                await asyncio.sleep(0)  # sending does not wait, and the relays here have to receive

    async def settle(self, index: StoreIndex, *, above_life: int = 0) -> int:
        """Return the life in which the index came to equal the mirror."""

        async def told() -> bool:
            row = await index.row(*self.holder)  # type: ignore[arg-type]  # it has a rank
            if row is None or row.broken or row.life <= above_life:
                return False
            return row.applied == self.mirror.received

        await until(told, DEADLINE_S)
        assert await index.digest(*self.holder) == index_digest(self.mirror.mirror.resident())  # type: ignore[arg-type]
        row = await index.row(*self.holder)  # type: ignore[arg-type]
        assert row is not None
        return row.life


async def test_recordings_survive_what_goes_wrong(kafka: str, redis_url: str, unique_name: str, tmp_path: Path) -> None:
    """Messages twice, workers killed at random moments, records replayed, relays replaced, the index forgotten."""
    rng = random.Random(unique_name)
    await create_topics(kafka, topic_specs([unique_name], PARTITIONS))
    options = {"WORKER_SESSION_TIMEOUT_S": "6", "WORKER_GROUP": f"group-{unique_name}", "PARTITIONS": str(PARTITIONS)}
    stack = Stack([unique_name], brokers=kafka, redis_url=redis_url, folder=tmp_path, options=options)
    store = RedisStore.from_urls([redis_url])
    index = StoreIndex(store, unique_name)
    folders = [*short_recordings(), *(folder for folder in long_recordings() if folder.name in SMALL)]
    async with AsyncExitStack() as exits:
        exits.push_async_callback(store.close)
        exits.push_async_callback(stack._stop_parts)
        recorded = [
            Recorded(load_capture(folder), unique_name, await exits.enter_async_context(Player())) for folder in folders
        ]
        async with _relaying(recorded, kafka):
            stack.start_worker("worker-0")
            stack.start_worker("worker-1")
            for part, victims in enumerate(([0], [1], [0, 1])):
                playing = asyncio.gather(*(one.play(part, 3) for one in recorded))
                await asyncio.wait({playing}, timeout=rng.uniform(0.0, 1.0))
                for victim in victims:
                    await stack.stop_part(f"worker-{victim}", hard=True)
                    stack.start_worker(f"worker-{victim}")
                await playing
            lives = [await one.settle(index) for one in recorded]
            assert sum(1 for one in recorded for _ in one.mirror.mirror.resident()) > 50
            await _replay_records(kafka, unique_name)
            ends = await _ends(kafka, unique_name)

            async def all_read_again() -> bool:
                cursors = {partition: offset for (_, partition), offset in (await store.cursors(unique_name)).items()}
                return all(cursors.get(partition, 0) >= end for partition, end in ends.items())

            await until(all_read_again, DEADLINE_S)
            assert [await one.settle(index) for one in recorded] == lives
        async with _relaying(recorded, kafka):
            lives = [await one.settle(index, above_life=life) for one, life in zip(recorded, lives, strict=True)]
            await _forget(redis_url, unique_name)
            assert [
                await one.settle(index, above_life=life - 1) for one, life in zip(recorded, lives, strict=True)
            ] == lives


@asynccontextmanager
async def _relaying(recorded: list[Recorded], brokers: str) -> AsyncIterator[None]:
    """A relay beside each recorded engine, in this process."""
    relays = [asyncio.create_task(Relay(one.config, FAST, client_options(brokers)).run()) for one in recorded]
    try:
        yield
        assert not any(relay.done() for relay in relays)
    finally:
        for relay in relays:
            relay.cancel()
        for relay in relays:
            with suppress(asyncio.CancelledError):
                await relay


async def _replay_records(brokers: str, model: str) -> None:
    """Write every record of the topic once more, into its partition, in order."""
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers, auto_offset_reset="earliest", enable_auto_commit=False)
    producer = AIOKafkaProducer(bootstrap_servers=brokers)
    partitions = [TopicPartition(events_topic(model), number) for number in range(PARTITIONS)]
    await consumer.start()
    await producer.start()
    try:
        consumer.assign(partitions)
        for partition, end in (await consumer.end_offsets(partitions)).items():
            while await consumer.position(partition) < end:
                for record in (await consumer.getmany(partition, timeout_ms=1000)).get(partition, []):
                    if record.offset < end:
                        await producer.send(record.topic, record.value, key=record.key, partition=record.partition)
    finally:
        await producer.stop()
        await consumer.stop()


async def _forget(redis_url: str, model: str) -> None:
    """Delete all that the index has of the model, as a server that was flushed has; the log is all there is."""
    async with aioredis.Redis.from_url(redis_url) as client:
        keys = [key async for key in client.scan_iter(f"{{{model_slug(model)}.*", count=5000)]
        assert await client.delete(*keys) > 0


async def _ends(brokers: str, model: str) -> dict[int, int]:
    """Return partition -> next offset of the topic."""
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers)
    await consumer.start()
    try:
        ends = await consumer.end_offsets([TopicPartition(events_topic(model), n) for n in range(PARTITIONS)])
    finally:
        await consumer.stop()
    return {tp.partition: end for tp, end in ends.items()}
