"""Pools that name blocks by engine hash, from their publishers' sockets to a router's answer."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ops.embedded.kafka import EmbeddedKafka
from ops.stack import RouterClient, Stack
from relays.dialects import PoolSettings
from tests.support.bench import DEADLINE_S
from tests.support.fake_engine import TOPIC, FakeEngine
from tests.support.fake_store import FakeStore
from tests.support.lmcache_server import LmcacheServer
from tests.support.payloads import batch, map_removed, pack
from tests.support.pool_bench import POOL, UNIT, PoolBench, named, stored
from tests.support.pool_frames import file_message
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)

KINDS = ["llmd", "mooncake"]
TIER = {"llmd": "disk", "mooncake": "host"}


@pytest.fixture
def prompts() -> Iterator[list[int]]:
    """Prompts of five blocks that share nothing."""
    return (list(range(first, first + 5 * UNIT)) for first in count(1000, 1000))


async def until_pooled(bench: PoolBench, model: str, prompt: list[int], blocks: int) -> None:
    """Wait until a replica that has nothing would load that many blocks from the pool."""

    async def pooled() -> bool:
        return await bench.pooled(model, prompt) == blocks * UNIT

    await until(pooled, DEADLINE_S)


async def until_said(bench: PoolBench, model: str, what: str) -> None:
    """Wait until an answer says this of the pool."""

    async def said() -> bool:
        return f"pool {POOL}: {what}" in await bench.reasons(model, [])

    await until(said, DEADLINE_S)


async def until_state(bench: PoolBench, model: str, state: str) -> None:
    """Wait until the router thinks this of the pool."""

    async def reached() -> bool:
        return bool((await bench.status(model))["state"] == state)

    await until(reached, DEADLINE_S)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_store_says_is_credited_where_a_replica_has_told_the_names(
    kafka: str, redis_url: str, unique_name: str, kind: str, prompts: Iterator[list[int]]
) -> None:
    """Whoever speaks first; to the replica that has nothing of its own, until any removal of a block."""
    first, second = next(prompts), next(prompts)
    async with PoolBench(kafka, redis_url, unique_name, kind=kind) as bench:
        names = await bench.compute(unique_name, first)
        async with bench.relaying():
            await bench.store(unique_name, names[:4])
            await until_pooled(bench, unique_name, first, 4)
            await until_state(bench, unique_name, "live")
            answer = (await bench.answers(unique_name, first))["cold"]
            assert answer["pools"] == {POOL: {TIER[kind]: 4 * UNIT}}
            assert answer["state"] == "live"
            assert not answer["reasons"]
            warm = (await bench.answers(unique_name, first))["warm"]
            assert (warm["cached_tokens"]["gpu"], warm["pools"]) == (5 * UNIT, {})

            names = named(second)
            await bench.store(unique_name, names)
            await bench.settle()
            assert await bench.pooled(unique_name, second) == 0
            await bench.compute(unique_name, second)
            await until_pooled(bench, unique_name, second, 5)
            await bench.remove(unique_name, names[2:3])
            await until_pooled(bench, unique_name, second, 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_publisher_that_is_gone_is_doubted_and_then_not_believed(
    kafka: str, redis_url: str, unique_name: str, kind: str, prompts: Iterator[list[int]]
) -> None:
    """Its relay lives on, and says so. When it is back, Mooncake has begun anew, and llm-d's files are there still."""
    prompt = next(prompts)
    async with PoolBench(kafka, redis_url, unique_name, kind=kind) as bench, bench.relaying():
        names = await bench.compute(unique_name, prompt)
        await bench.store(unique_name, names)
        await until_pooled(bench, unique_name, prompt, 5)
        life = (await bench.status(unique_name))["life"]
        bench.publishers[0].stop()
        await until_said(bench, unique_name, "stale (disconnected)")
        await until_said(bench, unique_name, "unknown (disconnected)")
        assert await bench.pooled(unique_name, prompt) == 0
        await bench.publishers[0].start()
        await bench.publishers[0].subscribed()
        await bench.hear()
        if kind == "mooncake":
            await until_state(bench, unique_name, "live")
            assert await bench.pooled(unique_name, prompt) == 0
            assert (await bench.status(unique_name))["life"] > life
            await bench.store(unique_name, names[:1])
            await until_pooled(bench, unique_name, prompt, 1)
        else:
            await until_said(bench, unique_name, "stale (events_lost)")
            await until_pooled(bench, unique_name, prompt, 5)
            assert (await bench.status(unique_name))["life"] == life


async def test_what_may_have_gone_in_a_gap_is_marked_and_ages_twice_as_fast(
    kafka: str, redis_url: str, unique_name: str, prompts: Iterator[list[int]]
) -> None:
    """It is credited with that mark until half its age; what came after the gap stays, unmarked in the end."""
    old, new = next(prompts), next(prompts)
    async with PoolBench(kafka, redis_url, unique_name, kind="llmd", max_age_s=12.0) as bench, bench.relaying():
        names = {id(prompt): await bench.compute(unique_name, prompt) for prompt in (old, new)}
        await bench.store(unique_name, names[id(old)])
        await until_pooled(bench, unique_name, old, 5)
        bench.publishers[0].lose()
        await bench.hear()
        await until_said(bench, unique_name, "stale (events_lost)")
        assert await bench.pooled(unique_name, old) == 5 * UNIT
        await bench.store(unique_name, names[id(new)])
        await until_pooled(bench, unique_name, old, 0)
        await until_state(bench, unique_name, "live")
        assert await bench.pooled(unique_name, new) == 5 * UNIT


@pytest.mark.parametrize("kind", KINDS)
async def test_a_relay_that_is_gone_is_missed_and_its_follower_knows_what_it_knew(
    kafka: str, redis_url: str, unique_name: str, kind: str, prompts: Iterator[list[int]]
) -> None:
    """The store says nothing twice: what the next relay credits comes from the topic, without what it has heard go.

    What went between the two is not known, so the pool is doubted; one whose master has begun anew holds nothing.
    """
    kept, ended = next(prompts), next(prompts)
    async with PoolBench(kafka, redis_url, unique_name, kind=kind) as bench:
        async with bench.relaying():
            for prompt in (kept, ended):
                await bench.store(unique_name, await bench.compute(unique_name, prompt))
                await until_pooled(bench, unique_name, prompt, 5)
            life = (await bench.status(unique_name))["life"]
        await until_said(bench, unique_name, "stale (relay_silent")
        await until_said(bench, unique_name, "unknown (relay_silent")
        assert await bench.pooled(unique_name, kept) == 0
        async with bench.relaying():
            assert (await bench.status(unique_name))["life"] > life
            await until_said(bench, unique_name, "stale (events_lost)")
            await until_pooled(bench, unique_name, kept, 5)
            await bench.remove(unique_name, named(ended)[2:])
            await until_pooled(bench, unique_name, ended, 2)
        bench.publishers[0].stop()
        await bench.publishers[0].start()
        async with bench.relaying():
            if kind == "mooncake":
                await until_state(bench, unique_name, "live")
                assert await bench.pooled(unique_name, kept) == 0
            else:
                await until_said(bench, unique_name, "stale (events_lost)")
                await until_pooled(bench, unique_name, kept, 5)


async def test_publishers_count_over_all_models(
    kafka: str, redis_url: str, unique_name: str, prompts: Iterator[list[int]]
) -> None:
    """What one says of another model is no gap, nor is what another says; a model's blocks are its own.

    llm-d's writers and its evictor are processes of their own: what one stored another removes.
    """
    models = (f"{unique_name}-a", f"{unique_name}-b")
    prompt = next(prompts)
    async with PoolBench(kafka, redis_url, *models, kind="llmd", publishers=2) as bench, bench.relaying():
        names = {model: await bench.compute(model, prompt) for model in models}
        assert names[models[0]] == names[models[1]]
        for part in range(5):
            for number, model in enumerate(models):
                await bench.store(model, names[model][part : part + 1], publisher=(part + number) % 2)
        for model in models:
            await until_pooled(bench, model, prompt, 5)
        await bench.remove(models[0], names[models[0]][3:], publisher=1)
        await until_pooled(bench, models[0], prompt, 3)
        await bench.settle()
        assert await bench.pooled(models[1], prompt) == 5 * UNIT
        for model in models:
            assert (await bench.status(model))["state"] == "live"
            assert not await bench.reasons(model, prompt)
        bench.publishers[1].lose()
        await bench.hear(1)
        for model in models:
            await until_said(bench, model, "stale (events_lost)")


async def test_lmcaches_server_is_a_pool_of_longer_blocks(
    kafka: str, redis_url: str, unique_name: str, prompts: Iterator[list[int]]
) -> None:
    """Chunks of eight tokens beside blocks of four; marked, for their events hide namespaces.

    A restarted server holds nothing. One that is gone is doubted, and then not believed.
    """
    prompt = next(prompts)  # two chunks and half of one
    settings = PoolSettings(block_size=2 * UNIT)
    async with (
        LmcacheServer(2 * UNIT) as server,
        PoolBench(kafka, redis_url, unique_name, kind="lmcache") as bench,
        bench.relaying_of([server.endpoint], settings),
    ):
        server.store(unique_name, prompt)
        await until_pooled(bench, unique_name, prompt, 4)
        assert await bench.reasons(unique_name, prompt) == f"pool {POOL}: namespaces_unchecked"
        await server.restart()
        await until_pooled(bench, unique_name, prompt, 0)
        server.store(unique_name, prompt[: 2 * UNIT])
        await until_pooled(bench, unique_name, prompt, 2)
        await server.stop()
        await until_said(bench, unique_name, "stale (disconnected)")
        assert await bench.pooled(unique_name, prompt) == 2 * UNIT
        await until_said(bench, unique_name, "unknown (disconnected)")
        assert await bench.pooled(unique_name, prompt) == 0


@pytest.mark.slow
async def test_an_outage_of_kafka_costs_nothing_but_time(
    own_kafka: EmbeddedKafka, redis_url: str, unique_name: str, prompts: Iterator[list[int]]
) -> None:
    """What store and replicas say meanwhile is credited when the broker is back, and what went is gone."""
    before, meanwhile = next(prompts), next(prompts)
    async with PoolBench(own_kafka.bootstrap, redis_url, unique_name, kind="llmd") as bench, bench.relaying():
        await bench.store(unique_name, await bench.compute(unique_name, before))
        await until_pooled(bench, unique_name, before, 5)
        await own_kafka.stop(hard=True)
        await bench.store(unique_name, await bench.compute(unique_name, meanwhile))
        await bench.remove(unique_name, named(before)[1:])
        await until_said(bench, unique_name, "unknown (relay_silent)")
        await own_kafka.start()
        await until_pooled(bench, unique_name, meanwhile, 5)
        assert await bench.pooled(unique_name, before) == UNIT
        await until_state(bench, unique_name, "live")


@pytest.mark.slow
async def test_the_processes(
    kafka: str, redis_url: str, unique_name: str, tmp_path: Path, prompts: Iterator[list[int]]
) -> None:
    """`kvatlas pool` beside relay, worker and router: credit that outlives the replica's copies, and `kill -9`."""
    prompt = next(prompts)
    options = {"WORKER_GROUP": unique_name, "STALE_AFTER_S": "2", "UNKNOWN_AFTER_S": "4"}
    stack = Stack([unique_name], brokers=kafka, redis_url=redis_url, folder=tmp_path, options=options)
    async with stack, FakeEngine() as engine, FakeStore() as store, RouterClient(stack.router_url) as router:
        reads = ["--set", f"block_size={UNIT}", "--set", "hash_seed=0"]
        where = ["--model", unique_name, "--events"]
        replica = ["--replica", "r", "--engine-version", "0.32.0", "--replay", engine.replay, "--topic", TOPIC.decode()]
        stack.start_relay([*where, engine.events, *replica, *reads, "--set", f'pools=[{{"name": "{POOL}"}}]'])
        pool = ["pool", "--kind", "llmd", "--name", POOL, *where, store.endpoint, *reads]
        stack.start("pool", pool)

        async def answer() -> dict[str, Any]:
            """What is said of the replica; the store repeats itself, for nobody tells it that somebody listens."""
            replicas = (await router.price({"model": unique_name, "token_ids": [*prompt, 9]}))["replicas"]
            return dict(replicas[0]) if replicas else {"pools": {}, "reasons": [], "cached_tokens": {"gpu": 0}}

        async def pooled(blocks: int) -> bool:
            return bool((await answer())["pools"].get(POOL, {}).get("disk", 0) == blocks * UNIT)

        async def said(what: str) -> bool:
            return bool((await answer())["reasons"] == [f"pool {POOL}: {what}"])

        async def heard() -> bool:
            await store.publish(file_message(unique_name, ("stored", named(prompt))))
            return await pooled(5)

        async def computed() -> bool:
            return bool((await answer())["cached_tokens"]["gpu"] == 5 * UNIT)

        await engine.publish(stored(prompt))
        await until(computed, DEADLINE_S)
        await engine.publish(pack(batch(map_removed(block_hashes=named(prompt)))))
        await until(heard, DEADLINE_S)

        await stack.stop_part("pool", hard=True)
        await until(lambda: said("unknown (relay_silent)"), DEADLINE_S)
        assert await pooled(0)
        stack.start("pool", pool)
        await until(lambda: said("stale (events_lost)"), DEADLINE_S)
        assert await pooled(5)
        assert (await answer())["cached_tokens"]["gpu"] == 0
