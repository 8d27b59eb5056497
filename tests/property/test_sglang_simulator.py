"""Laws of the simulated SGLang: what its events amount to is what it has, and no page is lost or counted twice."""

import random
from collections.abc import Iterator

import pytest

from ops.simulator.api import completion_of
from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.dialect import Dialect, dialect_of
from ops.simulator.sglang.engine import Engine
from ops.simulator.sglang.events import GPU, HOST
from ops.simulator.sglang.host import WritePolicy
from ops.simulator.sglang.pages import PLAIN, Namespace
from ops.simulator.sglang.requests import Limits, Request
from ops.simulator.sglang.wire import encode_batch
from relays.dialects import EngineSettings, sglang_profile
from relays.engine import EngineRank
from relays.engine_events import normalize_hash
from schemas.profiles import Holder, Tier

VERSIONS = ["0.5.8", "0.5.10.post1", "0.5.15", "0.5.18", "0.5.21", "0.5.23"]
TIERS: list[tuple[WritePolicy, int]] = [
    ("write_through", 0),
    ("write_through", 40),
    ("write_through_selective", 40),
    ("write_back", 40),
    ("write_back", 5),  # less than a prompt: what is evicted is mostly dropped
]
SHAPES = [(4, 64, False), (16, 16, False), (1, 256, False), (4, 64, True)]  # tokens of a page, pages, pairs
TIERS_KNOWN: tuple[Tier, ...] = ("gpu", "host")
MOST_STEPS = 5_000


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("policy", "host_pages"), TIERS)
@pytest.mark.parametrize(("size", "pages", "pairs"), SHAPES)
def test_a_mirror_of_the_events_equals_the_cache(
    version: str, policy: WritePolicy, host_pages: int, size: int, pages: int, *, pairs: bool
) -> None:
    """After every step of a random run with chunks, aborts, salts and flushes, in every version's encoding."""
    chance = random.Random(f"{version} {policy} {host_pages} {size} {pairs}")
    dialect = dialect_of(version)
    host_pages *= 4 if size == 1 else 1
    cache = Cache(dialect, size, pages, host_pages=host_pages, write_policy=policy)
    engine = Engine(cache, Limits(6, chance.choice([32, 64, 1000]), 10_000), pairs=pairs)
    settings = EngineSettings(block_size=size, hicache=bool(host_pages), drafting="eagle" if pairs else "none")
    rank = EngineRank(sglang_profile("m", "r", version, settings), Holder("r", 0), 1)
    sequence = 0
    for number in _random_run(engine, chance, salts=dialect.salts):
        plan = engine.schedule()
        if chance.random() < 0.03:
            engine.abort(str(number - 2))
        outcome = engine.complete(plan)
        _check_pages(engine, host_pages)
        if outcome.events:
            decoded = rank.take(sequence, encode_batch(1.0, outcome.events, 0, dialect))
            assert decoded is not None
            assert not decoded.rejects
            sequence += 1
        _check_tables(cache, rank, dialect)
    assert sequence > 50
    assert not any(rank.mirror.counts.values()), rank.mirror.counts


def _random_run(engine: Engine, chance: random.Random, *, salts: bool) -> Iterator[int]:
    """Submit requests that share beginnings; yield the last one's number whenever a step is to be made."""
    words = [[chance.randrange(1000) for _ in range(chance.randrange(1, 30))] for _ in range(4)]
    for number in range(100):
        prompt = (chance.choice(words) + [chance.randrange(1000) for _ in range(chance.randrange(30))])[:120]
        completion = completion_of(prompt, chance.randrange(1, 20))
        if chance.random() < 0.5:
            words = [*words[-6:], [*prompt, *completion][:100]]
        namespace = Namespace(salt="a") if salts and chance.random() < 0.3 else PLAIN
        engine.submit(Request(str(number), prompt, completion, namespace))
        if chance.random() < 0.1:
            engine.abort(str(number - 1))
        for _ in range(chance.randrange(1, 10)):
            if engine.busy:
                yield number
        if chance.random() < 0.02:
            yield from _until_idle(engine, number)
            assert engine.reset_prefix_cache()
    yield from _until_idle(engine, 100)


def _until_idle(engine: Engine, number: int) -> Iterator[int]:
    for _ in range(MOST_STEPS):
        if not engine.busy:
            return
        yield number
    pytest.fail("the engine never comes to rest")


def _check_pages(engine: Engine, host_pages: int) -> None:
    """Every page is free, in the tree, or a request's own; what can be evicted is what nobody holds."""
    cache, nodes = engine.cache, list(engine.cache.tree.table())
    held = sum(len(node.pages) for node in nodes if node.on_device)
    assert cache.free + held + engine.own_pages == cache.capacity
    unlocked = sum(len(node.pages) for node in nodes if node.on_device and not node.locks)
    assert cache.available == cache.free + unlocked
    if cache.host is not None:
        assert cache.host.free + sum(len(node.pages) for node in nodes if node.on_host) == host_pages
        assert cache.host.free >= 0
    for node in nodes:
        assert node.on_device or node.on_host
        above = node.parent
        assert above is not None
        assert not node.on_device or above.on_device or above.parent is None, "the device evicts leaves only"
    if not engine.running and not cache.unsettled:
        assert not any(node.locks or node.host_locks for node in nodes)


def _check_tables(cache: Cache, rank: EngineRank, dialect: Dialect) -> None:
    """Compare what is there with what the events amount to; copies to the host that are under way are not told yet."""
    device, host = ({normalize_hash(name, 64) for name in cache.table(medium)} for medium in (GPU, HOST))
    known_device, known_host = ({name for _, name in rank.mirror.engine_table(tier)} for tier in TIERS_KNOWN)
    if cache.host is not None and not dialect.host_events:
        # a demotion is silent, so a page is known to be in one of the tiers
        assert (known_device, known_host) == (set(), device | host)
        return
    assert known_device == device
    if cache.host is None or not cache.host.busy:
        assert known_host == host
