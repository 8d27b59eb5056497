"""A relay between SGLang's framing on real sockets and a real Kafka: the topic amounts to what the engine said."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ops.settings import Settings
from schemas.topics import topic_specs
from streams.topics import create_topics
from tests.support.bench import DEADLINE_S
from tests.support.fake_engine import FakeEngine
from tests.support.payloads import pack
from tests.support.sglang_bench import SglangBench, SglangTraffic
from tests.support.sglang_frames import recorded_messages
from tests.support.topic_index import TopicIndex
from tests.support.waiting import until

PARTITIONS = 2
VERSIONS = ["0.5.10.post1", "0.5.18", "0.5.21", "0.5.23"]  # arrays, arrays with salts, maps, a topic in replays


@asynccontextmanager
async def benched(brokers: str, model: str, version: str, **options: Any) -> AsyncIterator[SglangBench]:
    """A bench whose index is what the records in its topic amount to."""
    await create_topics(brokers, topic_specs([model], PARTITIONS))
    async with (
        TopicIndex(brokers, model, PARTITIONS) as index,
        SglangBench(brokers, model, index, version=version, **options) as bench,
    ):
        yield bench


def lives(bench: SglangBench) -> int:
    """Return how many lives the topic tells of."""
    assert isinstance(bench.index, TopicIndex)
    return len({record.life for record in bench.index.records})


def rejected(reason: str) -> float:
    """Return how many SGLang messages were refused in this process for that reason."""
    return REGISTRY.get_sample_value("kvatlas_relay_rejects_total", {"engine": "sglang", "reason": reason}) or 0.0


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_was_published_before_the_relay_comes_from_the_ring(
    kafka: str, unique_name: str, version: str
) -> None:
    """In each version's encoding and replay framing; what is published meanwhile follows in the same life."""
    async with benched(kafka, unique_name, version) as bench:
        await bench.publish(50)
        async with bench.relaying():
            await bench.publish(50)
            await bench.settle()
            await bench.publish(20)
            await bench.settle()
        assert bench.engines[0].asked[0] == 0
        assert lives(bench) == 1


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23"])
async def test_lost_messages_are_healed(kafka: str, unique_name: str, version: str) -> None:
    """Gaps are filled from the ring in both framings, a lost last message among them."""
    async with benched(kafka, unique_name, version) as bench, bench.relaying():
        await bench.publish(100, lost=0.2)
        await bench.publish(3, lost=1.0)
        await bench.settle()
        assert lives(bench) == 1


async def test_a_restarted_engine_begins_a_life(kafka: str, unique_name: str) -> None:
    """Its numbers begin at 0 again, and nothing of the old cache is believed."""
    async with benched(kafka, unique_name, "0.5.23") as bench, bench.relaying(Settings()):
        await bench.publish(30)
        await bench.settle()
        life = (await bench.row()).life
        await bench.restart_engine()
        await bench.settle(above_life=life)
        await bench.publish(10)
        await bench.settle(above_life=life)


async def test_ranks_are_apart(kafka: str, unique_name: str) -> None:
    """Each data-parallel rank has ports, numbers and an index of its own; a batch of another rank is refused."""
    before = rejected("rank_mismatch")
    async with benched(kafka, unique_name, "0.5.23", ranks=2) as bench, bench.relaying():
        await bench.publish(20, rank=0)
        await bench.publish(30, rank=1)
        stranger = SglangTraffic("0.5.23", seed=9, rank=0)
        for _ in range(3):
            await bench.engines[1].publish(stranger.message())
        await bench.publish(1, rank=1)
        await bench.settle()
        assert await bench.index.digest("r", 0) != await bench.index.digest("r", 1)
    assert rejected("rank_mismatch") - before == 3


async def test_recorded_messages_reach_the_index(kafka: str, unique_name: str) -> None:
    """Messages of real 0.5.23 publishers, of all kinds, in a row: nothing is refused but another rank's."""
    messages = [m for m in recorded_messages() if m.version == "0.5.23" and "rank 1" not in m.name]
    before = rejected("malformed")
    async with benched(kafka, unique_name, "0.5.23") as bench, bench.relaying():
        for message in messages:
            await _publish(bench, message.payload)
        await bench.settle()
    assert rejected("malformed") == before


async def test_a_hostile_pair_costs_one_event(kafka: str, unique_name: str) -> None:
    """A last token out of range is refused and counted; the relay lives on and what follows is applied."""
    before = rejected("token_range")
    hostile = [[1.0, [["BlockStored", [11], None, [[1, 2], [2, 3], [3, 4], [4, -5]], 4, None, "GPU"]], 0]]
    async with benched(kafka, unique_name, "0.5.23") as bench, bench.relaying():
        await bench.publish(3)
        for value in hostile:
            await _publish(bench, pack(value))
        await bench.publish(3)
        await bench.settle()
        await until(lambda: rejected("token_range") - before == 1, DEADLINE_S)
        assert lives(bench) == 1


async def _publish(bench: SglangBench, payload: bytes) -> None:
    engine: FakeEngine = bench.engines[0]
    bench.truths[0].take(await engine.publish(payload), payload)
