"""Kafka to Redis: a topic that relays have filled, and one real worker that folds it into an empty index.

The worker is stopped twice a second while Dynamo's tree applies the events that the worker has folded since, so that
both are measured on the same machine in the same mood. What Redis still does for the worker then is waited for, and is
the worker's time.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis as redis_client
from aiokafka import AIOKafkaProducer

from ops.bench.dynamo import Tree
from ops.bench.traffic import Message
from ops.embedded.processes import ChildProcess
from ops.settings import PREFIX, Settings
from schemas.topics import events_topic, model_slug, topic_specs
from streams.topics import create_topics

_POLL_S = 0.005
_QUIET_POLLS = 4  # without a flush, after which none is on its way
_SLICE_S = 0.5
_TIMEOUT_S = 900.0


class Preloaded(NamedTuple):
    """What waits in the topic, and how many blocks stand before each offset."""

    model: str
    records: int
    blocks_before: list[list[int]]  # [partition][offset]


class Ingested(NamedTuple):
    """How fast both went, without the worker's start."""

    blocks: int  # (block, replica) pairs
    seconds: float
    dynamo_seconds: float | None

    @property
    def blocks_per_s(self) -> float:
        """The worker's rate."""
        return self.blocks / self.seconds

    @property
    def dynamo_blocks_per_s(self) -> float | None:
        """Dynamo's rate."""
        return None if self.dynamo_seconds is None else self.blocks / self.dynamo_seconds

    @property
    def ratio(self) -> float | None:
        """The worker's rate as a part of Dynamo's."""
        return None if self.dynamo_seconds is None else self.dynamo_seconds / self.seconds


async def preload(brokers: str, model: str, messages: Sequence[Message]) -> Preloaded:
    """Make the topics and fill the model's with the messages, in order."""
    partitions = Settings().partitions
    await create_topics(brokers, topic_specs([model], partitions))
    blocks: list[list[int]] = [[0] for _ in range(partitions)]
    producer = AIOKafkaProducer(
        bootstrap_servers=brokers, enable_idempotence=True, acks="all", linger_ms=2, compression_type="lz4"
    )
    await producer.start()
    try:
        topic = events_topic(model)
        sent = [(message, await producer.send(topic, message.value, key=message.key)) for message in messages]
        for message, pending in sent:
            place = await pending
            before = blocks[place.partition]
            assert place.offset == len(before) - 1  # one producer, a new topic
            before.append(before[-1] + message.moved)
    finally:
        await producer.stop()
    return Preloaded(model, len(messages), blocks)


def start_part(
    name: str, model: str, brokers: str, redis_url: str, log: Path, options: Mapping[str, str] | None = None
) -> ChildProcess:
    """Start `kvatlas worker` or `kvatlas router` for one model."""
    settings = {
        "KAFKA_BROKERS": brokers,
        "REDIS_URL": redis_url,
        "MODELS": model,
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
    tree: Tree | None,
    events: Sequence[tuple[int, bytes]],
) -> Ingested:
    """Return how fast the worker folds what waits, from its first flush to its last, and Dynamo the same events."""
    progress = _Progress(redis_url, preloaded)
    applied = 0
    seconds = dynamo_seconds = 0.0
    deadline_s = time.monotonic() + _TIMEOUT_S

    async def until(reached: Callable[[], bool]) -> None:
        while not reached():
            if time.monotonic() > deadline_s or worker.exit_code is not None:
                told = f"the worker folded {progress.records} of {preloaded.records} records"
                raise TimeoutError(f"{told}; exit code {worker.exit_code}; its log ends: {end_of(log)}")
            await asyncio.sleep(_POLL_S)
            progress.look()

    def catch_up() -> float:
        nonlocal applied
        first, applied = applied, round(len(events) * progress.blocks / progress.goal)
        return tree.apply(events[first:applied]) if tree is not None else 0.0

    await until(lambda: progress.records > 0)
    with _stopped(worker):
        await progress.settle()
        blocks_at_start = progress.blocks
        catch_up()
    while not progress.finished:
        began_s = time.perf_counter()
        end_s = began_s + _SLICE_S
        await until(lambda: progress.finished or time.perf_counter() > end_s)  # noqa: B023  # called now
        with _stopped(worker):
            seconds += await progress.settle() - began_s
            dynamo_seconds += catch_up()
    progress.close()
    if not seconds:
        raise ValueError(f"{preloaded.records} records are too few: the first flush had them all")
    return Ingested(progress.goal - blocks_at_start, seconds, dynamo_seconds if tree is not None else None)


@contextmanager
def _stopped(process: ChildProcess) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


class _Progress:
    """How far the cursors in Redis are."""

    def __init__(self, redis_url: str, preloaded: Preloaded) -> None:
        self.goal = sum(before[-1] for before in preloaded.blocks_before)
        self.records = 0
        self.blocks = 0
        self._client = redis_client.Redis.from_url(redis_url)
        self._key = f"{{{model_slug(preloaded.model)}.0}}c"
        self._preloaded = preloaded

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @property
    def finished(self) -> bool:
        """Whether all records are in the index."""
        return self.records == self._preloaded.records

    def look(self) -> None:
        """Read the cursors."""
        cursors: Any = self._client.hgetall(self._key)
        places = [(int(field.split(b" ")[1]), int(offset)) for field, offset in cursors.items()]
        self.records = sum(offset for _, offset in places)
        self.blocks = sum(self._preloaded.blocks_before[partition][offset] for partition, offset in places)

    async def settle(self) -> float:
        """Return once Redis has done what the stopped worker sent, and when that was (`time.perf_counter`)."""
        settled_s = time.perf_counter()
        quiet = 0
        while quiet < _QUIET_POLLS:
            before = self.records
            self.look()
            quiet += 1
            if self.records != before:
                settled_s, quiet = time.perf_counter(), 0
            await asyncio.sleep(_POLL_S)
        return settled_s
