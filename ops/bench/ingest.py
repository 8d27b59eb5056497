"""Kafka to Redis: a topic that relays have filled, and one real worker that folds it into an empty index.

The worker is stopped twice a second while Dynamo's tree applies the events that the worker has folded since, so that
both are measured on the same machine in the same mood.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis as redis_client
from aiokafka import AIOKafkaProducer

from ops.bench.dynamo import Tree
from ops.bench.traffic import MODEL, Message
from ops.embedded.processes import ChildProcess
from ops.settings import PREFIX, Settings
from schemas.topics import events_topic, model_slug, topic_specs
from streams.topics import create_topics

_POLL_S = 0.01
_SLICE_S = 0.5
_TIMEOUT_S = 900.0


class Preloaded(NamedTuple):
    """What waits in the topic, and how many blocks stand before each offset."""

    records: int
    blocks_before: list[list[int]]  # [partition][offset]


class Ingested(NamedTuple):
    """How fast both went, without the worker's start."""

    blocks: int  # (block, replica) pairs
    seconds: float
    dynamo_seconds: float

    @property
    def blocks_per_s(self) -> float:
        """The worker's rate."""
        return self.blocks / self.seconds

    @property
    def ratio(self) -> float:
        """The worker's rate as a part of Dynamo's."""
        return self.dynamo_seconds / self.seconds


async def preload(brokers: str, messages: Sequence[Message]) -> Preloaded:
    """Make the topics and fill the model's with the messages, in order."""
    partitions = Settings().partitions
    await create_topics(brokers, topic_specs([MODEL], partitions))
    blocks: list[list[int]] = [[0] for _ in range(partitions)]
    producer = AIOKafkaProducer(
        bootstrap_servers=brokers, enable_idempotence=True, acks="all", linger_ms=2, compression_type="lz4"
    )
    await producer.start()
    try:
        topic = events_topic(MODEL)
        sent = [(message, await producer.send(topic, message.value, key=message.key)) for message in messages]
        for message, pending in sent:
            place = await pending
            before = blocks[place.partition]
            assert place.offset == len(before) - 1  # one producer, a new topic
            before.append(before[-1] + message.moved)
    finally:
        await producer.stop()
    return Preloaded(len(messages), blocks)


def start_part(
    name: str, brokers: str, redis_url: str, log: Path, options: Mapping[str, str] | None = None
) -> ChildProcess:
    """Start `kvatlas worker` or `kvatlas router` for the benchmark's model."""
    settings = {
        "KAFKA_BROKERS": brokers,
        "REDIS_URL": redis_url,
        "MODELS": MODEL,
        "LOG_FORMAT": "json",
        **(options or {}),
    }
    environment = [f"{PREFIX}{key}={value}" for key, value in settings.items()]
    return ChildProcess(["env", *environment, sys.executable, "-m", "ops.cli", name], log)


def end_of(log: Path) -> str:
    """Return the last lines of a log."""
    return log.read_text()[-2000:]


async def watch(
    worker: ChildProcess,
    log: Path,
    redis_url: str,
    preloaded: Preloaded,
    tree: Tree,
    events: Sequence[tuple[int, bytes]],
) -> Ingested:
    """Return how fast the worker folds what waits, from its first flush to its last, and Dynamo the same events."""
    progress = _Progress(redis_url, preloaded)
    events_per_block = len(events) / progress.goal
    applied = 0
    seconds = dynamo_seconds = 0.0
    blocks_at_start = None
    began_s = time.perf_counter()
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        await asyncio.sleep(_POLL_S)
        records, blocks = progress.read()
        now_s = time.perf_counter()
        if time.monotonic() > deadline_s or worker.exit_code is not None:
            told = f"the worker folded {records} of {preloaded.records} records; exit code {worker.exit_code}"
            raise TimeoutError(f"{told}; its log ends: {end_of(log)}")
        if records and blocks_at_start is None:
            blocks_at_start, began_s = blocks, now_s
            applied = round(blocks * events_per_block)
            tree.apply(events[:applied])
        finished = records == preloaded.records
        if blocks_at_start is not None and (finished or now_s - began_s > _SLICE_S):
            os.kill(worker.pid, signal.SIGSTOP)
            try:
                seconds += time.perf_counter() - began_s
                upto = len(events) if finished else round(progress.read()[1] * events_per_block)
                dynamo_seconds += tree.apply(events[applied:upto])
                applied = upto
            finally:
                began_s = time.perf_counter()
                os.kill(worker.pid, signal.SIGCONT)
        if finished and blocks_at_start is not None:
            return Ingested(progress.goal - blocks_at_start, seconds, dynamo_seconds)


class _Progress:
    """How far the cursors in Redis are."""

    def __init__(self, redis_url: str, preloaded: Preloaded) -> None:
        self.goal = sum(before[-1] for before in preloaded.blocks_before)
        self._client = redis_client.Redis.from_url(redis_url)
        self._key = f"{{{model_slug(MODEL)}.0}}c"
        self._preloaded = preloaded

    def read(self) -> tuple[int, int]:
        """Return the records and the blocks that are in the index."""
        cursors: Any = self._client.hgetall(self._key)
        places = [(int(field.split(b" ")[1]), int(offset)) for field, offset in cursors.items()]
        blocks = sum(self._preloaded.blocks_before[partition][offset] for partition, offset in places)
        return sum(offset for _, offset in places), blocks
