"""A replica that is heard through Dynamo's consolidator, which cannot replay: doubt in place of new lives."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from index.digests import index_digest
from index.liveness import Judgement, judge
from ops.kafka_client import client_options
from relays.dialects import EngineSettings
from relays.engine import EngineRank
from relays.process import Relay, RelayConfig, profile_of
from schemas.profiles import Holder, Rank
from schemas.topics import topic_specs
from streams.topics import create_topics
from tests.support.fake_store import FakeStore
from tests.support.payloads import batch, map_removed, pack
from tests.support.pool_bench import SETTINGS, UNIT
from tests.support.pool_frames import frames
from tests.support.running import running
from tests.support.topic_index import TopicIndex
from tests.support.vllm_frames import map_stored
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)

MAX_AGE_S = 12.0


class Consolidated:
    """What the consolidator says, what it would amount to, and what the index makes of it."""

    def __init__(self, brokers: str, model: str) -> None:
        self.publisher = FakeStore(first=0)
        self.config = RelayConfig(
            model=model,
            replica="d",
            engine="dynamo",
            version="1.0",
            ranks=(Rank(0, self.publisher.endpoint),),
            settings=EngineSettings(block_size=UNIT, max_age_s=MAX_AGE_S),
        )
        self.index = TopicIndex(brokers, model, 1)
        self.relay = Relay(self.config, SETTINGS, client_options(brokers))
        self.truth = EngineRank(profile_of(self.config), Holder("d", 0), 1)
        self.life = 0

    async def judged(self) -> Judgement:
        """Return what a router would think of the replica."""
        row = await self.index.row("d")
        if row is None:
            return Judgement("unknown")
        self.life = row.life
        return judge(row, stale_after_s=SETTINGS.stale_after_s, unknown_after_s=SETTINGS.unknown_after_s)

    async def until_judged(self, state: str, *reasons: str) -> None:
        """Wait until a router would think that."""

        async def judged() -> bool:
            return await self.judged() == (state, reasons)

        await until(judged)

    async def say(self, *events: dict[str, Any], lost: bool = False) -> None:
        """Let it publish, or lose, a message."""
        payload = pack(batch(*events))
        if lost:
            self.publisher.lose()
            return
        self.truth.take(self.publisher.next, payload)
        await self.publisher.publish(frames(b"", 0, payload))

    async def hear(self) -> None:
        """Let it speak until it is heard."""
        row = await self.index.row("d")
        before = row.applied if row is not None else {}

        async def heard() -> bool:
            await self.say()
            row = await self.index.row("d")
            return row is not None and row.applied not in (before, {})

        await until(heard)

    async def settle(self) -> None:
        """Wait until the index has all that was said; then it is equal."""

        async def told() -> bool:
            row = await self.index.row("d")
            return row is not None and row.applied == {"0": self.publisher.next - 1}

        await until(told)
        assert await self.index.digest("d") == index_digest(self.truth.mirror.resident())


@asynccontextmanager
async def consolidated(brokers: str, model: str) -> AsyncIterator[Consolidated]:
    """A consolidator that has been heard."""
    await create_topics(brokers, topic_specs([model], 1))
    one = Consolidated(brokers, model)
    async with one.publisher, one.index, running(one.relay):
        await one.publisher.subscribed()
        await one.hear()
        yield one


def block(name: int, medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    """Return a store of one block of four tokens: the consolidator sends each by itself."""
    return map_stored(block_hashes=[name], token_ids=[name] * UNIT, medium=medium, **fields)


async def test_a_gap_is_doubted_and_not_forgotten(kafka: str, unique_name: str) -> None:
    """What is known stays, marked, until half its age; what is told after the gap outlives the doubt."""
    async with consolidated(kafka, unique_name) as one:
        await one.say(block(1), block(2, parent_block_hash=1))
        await one.say(block(3, "CPU_TIER1"), block(4, "CPU_TIER2"))
        await one.say(map_removed(block_hashes=[3], medium="CPU_TIER2"))  # gone from its last tier, whichever
        await one.settle()
        await one.until_judged("live")
        life = one.life
        await one.say(map_removed(block_hashes=[1]), lost=True)
        await one.say()
        await one.until_judged("stale", "events_lost")
        await one.settle()  # block 1 too
        await one.say(block(7))
        await one.until_judged("live")
        assert one.life == life
        one.truth.begin_life(2)
        one.truth.take(0, pack(batch(block(7))))
        assert await one.index.digest("d") == index_digest(one.truth.mirror.resident())


async def test_another_run_begins_a_life_and_a_lost_one_is_not_believed(kafka: str, unique_name: str) -> None:
    """Gone: stale, then unknown. Back, with a sequence that went back: nothing is known from before."""
    async with consolidated(kafka, unique_name) as one:
        await one.say(block(1), block(2))
        await one.settle()
        await one.until_judged("live")
        life = one.life
        one.publisher.stop()
        await one.until_judged("stale", "disconnected")
        await one.until_judged("unknown", "disconnected")
        assert one.life == life
        one.truth.begin_life(2)
        await one.publisher.start()
        await one.publisher.subscribed()
        await one.hear()
        await one.say(block(3))
        await one.settle()
        await one.until_judged("live")
        assert one.life > life
