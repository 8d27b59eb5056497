"""Kafka to Redis: a topic that relays have filled, and one real worker that folds it into an empty index."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import redis as redis_client
from aiokafka import AIOKafkaProducer

from ops.bench.traffic import MODEL, Message
from ops.embedded.processes import ChildProcess
from ops.settings import PREFIX, Settings
from schemas.topics import events_topic, model_slug, topic_specs
from streams.topics import create_topics

_POLL_S = 0.01
_TIMEOUT_S = 600.0
_STOP_S = 15.0


class Preloaded(NamedTuple):
    """What waits in the topic, and how much of it stands before each offset."""

    records: int
    moved_before: list[list[int]]  # [partition][offset]


class Ingested(NamedTuple):
    """How fast it went, without the worker's start."""

    moved: int  # (block, replica) pairs
    seconds: float

    @property
    def per_s(self) -> float:
        """Pairs a second."""
        return self.moved / self.seconds


async def preload(brokers: str, messages: Sequence[Message]) -> Preloaded:
    """Make the topics and fill the model's with the messages, in order."""
    partitions = Settings().partitions
    await create_topics(brokers, topic_specs([MODEL], partitions))
    topic = events_topic(MODEL)
    moved: list[list[int]] = [[0] for _ in range(partitions)]
    producer = AIOKafkaProducer(
        bootstrap_servers=brokers, enable_idempotence=True, acks="all", linger_ms=2, compression_type="lz4"
    )
    await producer.start()
    try:
        sent = [(message, await producer.send(topic, message.value, key=message.key)) for message in messages]
        for message, pending in sent:
            place = await pending
            before = moved[place.partition]
            assert place.offset == len(before) - 1  # one producer, a new topic
            before.append(before[-1] + message.moved)
    finally:
        await producer.stop()
    return Preloaded(len(messages), moved)


def start_worker(brokers: str, redis_url: str, log: Path, options: Mapping[str, str] | None = None) -> ChildProcess:
    """Start `kvatlas worker`."""
    return start_part("worker", brokers, redis_url, log, options)


def start_part(
    name: str, brokers: str, redis_url: str, log: Path, options: Mapping[str, str] | None = None
) -> ChildProcess:
    """Start a process of the stack for the benchmark's model."""
    settings = {
        "KAFKA_BROKERS": brokers,
        "REDIS_URL": redis_url,
        "MODELS": MODEL,
        "LOG_FORMAT": "json",
        **(options or {}),
    }
    environment = [f"{PREFIX}{key}={value}" for key, value in settings.items()]
    return ChildProcess(["env", *environment, sys.executable, "-m", "ops.cli", name], log)


async def watch(client: "redis_client.Redis", preloaded: Preloaded) -> Ingested:
    """Return how fast the worker folds what waits, from its first flush to its last."""
    key = f"{{{model_slug(MODEL)}.0}}c"
    goal = sum(moved[-1] for moved in preloaded.moved_before)
    first: tuple[float, int] | None = None
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        cursors = client.hgetall(key)
        now_s = time.monotonic()
        done = records = 0
        for field, offset in cursors.items():
            done += preloaded.moved_before[int(field.split(b" ")[1])][int(offset)]
            records += int(offset)
        if records and first is None:
            first = (now_s, done)
        if records == preloaded.records and first is not None:
            return Ingested(goal - first[1], now_s - first[0])
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"the worker folded {records} of {preloaded.records} records in {_TIMEOUT_S} s")
