"""A replica's own blocks continued from its pools, case by case: blocks of four tokens, chunks as they come."""

from typing import Any

import msgspec
import pytest

from index.join import PoolPart, unread_reason, with_pools
from index.match import NOTHING, Reach, Run
from index.rules import make_rules
from schemas.profiles import Group, GroupClass, HashScheme, Profile, Tier, TierProfile
from tests.support.engines import FULL, pairs, profile

HOST, DISK = 1, 2  # residency bits of the pool
PROMPT = 41  # tokens: ten blocks and one token
MIXED = make_rules(profile(pairs=pairs((FULL, "gpu"))))
CONNECTED = make_rules(profile(pairs=pairs((FULL, "gpu"), (FULL, "host")), tier_walk="device_then_lower"))


def pool(*, chunk: int = 1, last_token: Any = "never", unit: int = 4, **changes: Any) -> Profile:
    """Return a pool's profile; of a model with one full group."""
    of = GroupClass("full", None, unit)
    tiers = tuple(TierProfile(name, chunk=chunk, last_token=last_token) for name in ("host", "disk"))
    return profile(
        Group(0, "full", unit),
        unit=unit,
        tiers=tiers,
        pairs=pairs((of, "host"), (of, "disk")),
        alignment=unit,
        **changes,
    )


def part(
    of: Profile, *runs: tuple[int, int, int], tiers: tuple[Tier, ...] = ("host", "disk"), name: str = "p"
) -> PoolPart:
    """Return a pool's blocks along a prompt: (start, length, residency) each."""
    found = PoolPart(of, make_rules(of), [Run(*run) for run in runs], tiers)
    found.name = name
    return found


def own(**by_tier: int) -> Reach:
    return Reach(sum(by_tier.values()), by_tier)  # type: ignore[arg-type]  # tiers


def test_a_pool_continues_where_the_device_ends() -> None:
    """In one unbroken run; behind a hole nothing counts."""
    p = part(pool(), (0, 4, HOST), (4, 2, DISK), (7, 2, HOST))
    assert with_pools(own(gpu=12), MIXED, [p], PROMPT) == Reach(
        24, {"gpu": 12, "pool": 12}, pools={"p": {"host": 4, "disk": 8}}
    )
    assert with_pools(own(gpu=24), MIXED, [p], PROMPT) == own(gpu=24)
    assert with_pools(NOTHING, MIXED, [p], PROMPT).pools == {"p": {"host": 16, "disk": 8}}


def test_a_pool_that_is_looked_up_from_the_start_has_to_have_the_start() -> None:
    """What the device has does not bridge what is missing in the pool."""
    missing_first = part(pool(lookup_from_start=True), (1, 8, HOST))
    assert with_pools(own(gpu=8), MIXED, [missing_first], PROMPT) == own(gpu=8)
    p = part(pool(lookup_from_start=True), (0, 5, HOST))
    assert with_pools(own(gpu=8), MIXED, [p], PROMPT) == Reach(20, {"gpu": 8, "pool": 12}, pools={"p": {"host": 12}})


def test_units_differ() -> None:
    """Chunks of 16 tokens beside blocks of four: what is loaded ends where a chunk does."""
    p = part(pool(unit=16, lookup_from_start=True), (0, 2, HOST))
    assert with_pools(own(gpu=20), MIXED, [p], PROMPT) == Reach(32, {"gpu": 20, "pool": 12}, pools={"p": {"host": 12}})


@pytest.mark.parametrize(
    ("device", "first", "length", "reached"),
    [(0, 0, 8, 32), (0, 0, 7, 16), (12, 0, 8, 32), (12, 0, 7, 12), (12, 4, 4, 12), (16, 4, 4, 32), (16, 7, 1, 32)],
)
def test_only_whole_chunks_count(device: int, first: int, length: int, reached: int) -> None:
    """Of four blocks, from the prompt's start on, each marked by its last; the device's end may lie inside one."""
    p = part(pool(chunk=4), (first, length, HOST))
    assert with_pools(own(gpu=device), MIXED, [p], PROMPT).tokens == reached


def test_less_than_a_chunk_is_not_loaded() -> None:
    """OffloadingConnector loads nothing where the device has a part of the last chunk; LMCache's does."""
    assert with_pools(own(gpu=12), MIXED, [part(pool(chunk=4), (0, 4, HOST))], PROMPT) == own(gpu=12)
    p = part(pool(chunk=4, lookup_from_start=True), (0, 4, HOST))
    assert with_pools(own(gpu=12), MIXED, [p], PROMPT).tokens == 16


@pytest.mark.parametrize(("last_token", "reached"), [("never", 36), ("uncounted", 39), ("counted", 40)])
def test_the_prompts_last_token(last_token: str, reached: int) -> None:
    """Whether a load may cover it, and whether the engine counts it; a log of whole lists has no such limit."""
    p = part(pool(last_token=last_token), (0, 10, HOST))
    assert with_pools(NOTHING, MIXED, [p], 40).tokens == reached
    assert with_pools(NOTHING, MIXED, [p], 40, whole_prompt=True).tokens == 40


def test_only_tiers_that_the_reader_reads() -> None:
    """A block in both counts under the faster one that it can read."""
    runs = (0, 2, HOST | DISK), (2, 2, DISK), (4, 2, HOST)
    cases: list[tuple[tuple[Tier, ...], dict[str, int]]] = [
        (("host", "disk"), {"host": 16, "disk": 8}),
        (("disk",), {"disk": 16}),
        (("host",), {"host": 8}),
    ]
    for tiers, split in cases:
        assert with_pools(NOTHING, MIXED, [part(pool(), *runs, tiers=tiers)], PROMPT).pools == {"p": split}


def test_the_first_pool_that_has_more_gives_all() -> None:
    """In the order of the profile, as a connector of connectors asks; the second's blocks are not added."""
    first, second = part(pool(), (2, 1, HOST), name="a"), part(pool(), (0, 9, HOST), name="b")
    assert with_pools(own(gpu=8), MIXED, [first, second], PROMPT).pools == {"a": {"host": 4}}
    assert with_pools(own(gpu=8), MIXED, [second, first], PROMPT).pools == {"b": {"host": 28}}
    assert with_pools(own(gpu=4), MIXED, [first, second], PROMPT).pools == {"b": {"host": 32}}


def test_a_connector_that_has_more_than_the_device_loads_alone() -> None:
    """Where tiers alternate along the run, SGLang's, a pool continues behind them."""
    p = part(pool(), (0, 9, HOST))
    assert with_pools(own(gpu=8, host=4), CONNECTED, [p], PROMPT) == own(gpu=8, host=4)
    assert with_pools(own(gpu=8), CONNECTED, [p], PROMPT).tokens == 36
    assert with_pools(own(gpu=8, host=4), MIXED, [p], PROMPT).by_tier == {"gpu": 8, "host": 4, "pool": 24}


def test_an_upper_bound_stays_one() -> None:
    """By policy it is credited, or nothing is."""
    p = part(pool(), (0, 9, HOST))
    credited = make_rules(profile(pairs=pairs((FULL, "gpu")), upper_bound=True))
    assert with_pools(Reach(4, {"gpu": 4}, True), credited, [p], PROMPT).upper_bound
    gone = make_rules(profile(pairs=pairs((FULL, "gpu")), upper_bound=True, upper_bound_policy="gone"))
    assert with_pools(NOTHING, gone, [p], PROMPT) == NOTHING


@pytest.mark.parametrize(
    ("replica", "reason"),
    [
        (profile(), ""),
        (profile(Group(0, "full", 4), Group(1, "full", 4)), ""),
        (profile(unit=0), "block_size_unknown"),
        (profile(Group(0, "window", 4, 9)), "groups_not_told"),
        (profile(Group(0, "full", 4), Group(1, "window", 4, 9)), "groups_not_told"),
        (profile(hash=HashScheme("sha256", "1")), ""),
    ],
)
def test_pools_count_for_one_class_of_full_attention(replica: Profile, reason: str) -> None:
    """Their events do not tell a window's or a state's blocks; of a replica without a unit nothing is known."""
    assert unread_reason(pool(), replica) == reason


def test_names_have_to_agree_where_a_pool_has_nothing_else() -> None:
    """Algorithm, seed and size of blocks, and the engine's way to hash them."""
    named = pool(hash_only_stores=True, hash=HashScheme("sha256", "0"))
    alike = profile(hash=HashScheme("sha256", "0"))
    assert not unread_reason(named, alike)
    for changes in (
        {"hash": HashScheme("sha256", "1")},
        {"hash": HashScheme("sha256", None)},
        {"hash": HashScheme("xxhash", "0")},
        {"engine": "sglang"},
        {"unit": 8, "groups": (Group(0, "full", 8),)},
    ):
        assert unread_reason(named, msgspec.structs.replace(alike, **changes))
