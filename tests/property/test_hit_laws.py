"""Laws of the hit rule, most of them against a reference that tries every length. The unit is two tokens."""

from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from index.match import Reach, reusable_tokens
from index.rules import make_rules
from schemas.profiles import Group, GroupClass, GroupKind, Pair, Profile, Tier
from tests.support import hit_rule
from tests.support.engines import FULL, pairs, profile, tiers
from tests.support.hits import runs_of

UNIT = 2
MAX_UNITS = 14


@st.composite
def profiles(
    draw: st.DrawFn,
    /,
    sizes: tuple[int, ...] = (2, 4, 6),
    names: tuple[Tier, ...] = ("gpu", "host", "disk"),
    **changes: Any,
) -> Profile:
    """Draw a profile of one to three classes with blocks of some sizes, in some tiers.

    Connectors and drafting need a full class.
    """
    drawn: list[GroupKind] = draw(st.lists(st.sampled_from(["full", "window", "state"]), max_size=3, unique=True))
    kinds: list[GroupKind] = drawn
    if "full" not in drawn and (not drawn or "tier_walk" in changes or "drafting" in changes):
        kinds = ["full", *drawn]
    groups = [
        Group(index, kind, draw(st.sampled_from(sizes)), draw(st.integers(2, 13)) if kind == "window" else None)
        for index, kind in enumerate(kinds)
    ]
    listed = [Pair(group.group_class, tier) for group in groups for tier in names]
    return profile(*groups, unit=UNIT, pairs=tuple(draw(st.permutations(listed))), **changes)


@st.composite
def holdings(draw: st.DrawFn, known: Profile) -> tuple[list[int], int]:
    """Draw a prompt's length and the residency of each of its units, long unbroken stretches among them."""
    prompt_tokens = draw(st.integers(0, MAX_UNITS * UNIT + 1))
    every = (1 << len(known.pairs)) - 1
    residency = st.one_of(st.just(every), st.integers(0, every), st.integers(0, every).map(lambda bits: every & ~bits))
    units = prompt_tokens // UNIT
    residencies = draw(st.lists(residency, min_size=units, max_size=units))
    return [_whole_blocks(known, number, value) for number, value in enumerate(residencies)], prompt_tokens


def _whole_blocks(known: Profile, number: int, residency: int) -> int:
    """Return the residency without marks inside a block: an engine that hits whole blocks has no such entries."""
    for bit, pair in enumerate(known.pairs):
        if (number + 1) * UNIT % pair.group_class.block_size:
            residency &= ~(1 << bit)
    return residency


def reached(known: Profile, residencies: list[int], prompt_tokens: int) -> Reach:
    return reusable_tokens(runs_of(residencies), make_rules(known), prompt_tokens)


@given(st.data())
@settings(max_examples=600, deadline=None)
def test_a_mixed_hit_is_the_longest_that_all_classes_allow(data: st.DataObject) -> None:
    """Any classes, block sizes, tiers and residency: the length and its split are the reference's."""
    known = data.draw(profiles())
    residencies, prompt_tokens = data.draw(holdings(known))
    found = reached(known, residencies, prompt_tokens)
    assert found.tokens == hit_rule.hit(known, residencies, prompt_tokens)
    assert found.by_tier == hit_rule.by_tier(known, residencies, found.tokens)


@given(st.data(), st.sampled_from(["drop_unit", "drop_unit_ahead"]))
@settings(max_examples=500, deadline=None)
def test_drafting_takes_a_block_that_must_be_there(data: st.DataObject, drafting: str) -> None:
    """With blocks of one size, any classes beside a full one: the hit under speculation is the reference's."""
    size = data.draw(st.sampled_from([2, 4]))
    known = data.draw(profiles((size,), ("gpu",), drafting=drafting))
    residencies, prompt_tokens = data.draw(holdings(known))
    assert reached(known, residencies, prompt_tokens).tokens == hit_rule.hit(known, residencies, prompt_tokens)


@given(st.data(), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6]))
@settings(max_examples=500, deadline=None)
def test_drafting_takes_each_classs_own_block(data: st.DataObject, full: int, state: int) -> None:
    """Full blocks of one size and states of another: the hit under speculation is the reference's."""
    groups = (Group(0, "full", full), Group(1, "state", state))
    listed = tuple(Pair(group.group_class, "gpu") for group in groups)
    known = profile(*groups, unit=UNIT, pairs=listed, drafting="drop_unit_ahead")
    residencies, prompt_tokens = data.draw(holdings(known))
    assert reached(known, residencies, prompt_tokens).tokens == hit_rule.hit(known, residencies, prompt_tokens)


@given(st.data())
@settings(max_examples=600, deadline=None)
def test_a_lower_tier_goes_on_from_the_devices_hit(data: st.DataObject) -> None:
    """SimpleCPUOffloadConnector: any classes, block sizes and residency give the reference's length."""
    known = data.draw(profiles(names=("gpu", "host"), tier_walk="device_then_lower", tiers=tiers("gpu", "host")))
    residencies, prompt_tokens = data.draw(holdings(known))
    found = reached(known, residencies, prompt_tokens)
    assert found.tokens == hit_rule.hit(known, residencies, prompt_tokens)
    assert sum(found.by_tier.values()) == found.tokens


@given(st.data(), st.integers(1, 3), st.sampled_from([2, 4]))
@settings(max_examples=600, deadline=None)
def test_a_lower_tier_is_loaded_in_chunks(data: st.DataObject, chunk: int, size: int) -> None:
    """OffloadingConnector: any classes with blocks of one size, chunks of one to three of them."""
    host = tiers("gpu", "host", chunk=chunk, last_token="counted")
    known = data.draw(profiles((size,), ("gpu", "host"), tier_walk="device_then_lower", tiers=host))
    residencies, prompt_tokens = data.draw(holdings(known))
    found = reached(known, residencies, prompt_tokens)
    assert found.tokens == hit_rule.hit(known, residencies, prompt_tokens)
    assert sum(found.by_tier.values()) == found.tokens


@given(st.data(), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_an_uncounted_last_token_is_not_reported(data: st.DataObject, chunk: int) -> None:
    """With one full group of an old version a load of the whole prompt reports one token less."""
    host = tiers("gpu", "host", chunk=chunk, last_token="uncounted")
    full = GroupClass("full", None, UNIT)
    known = profile(unit=UNIT, pairs=pairs((full, "gpu"), (full, "host")), tier_walk="device_then_lower", tiers=host)
    residencies, prompt_tokens = data.draw(holdings(known))
    assert reached(known, residencies, prompt_tokens).tokens == hit_rule.hit(known, residencies, prompt_tokens)


@given(st.data(), st.sampled_from([4, 8]), st.sampled_from(["none", "drop_unit_ahead"]))
@settings(max_examples=500, deadline=None)
def test_partial_blocks_end_a_hit_where_the_engine_ends_it(data: st.DataObject, size: int, drafting: str) -> None:
    """With a match unit finer than the block any marks give the length that vLLM's finders give."""
    groups = (Group(0, "full", size), Group(1, "state", size))
    listed = tuple(Pair(group.group_class, "gpu") for group in groups)
    known = profile(*groups, unit=UNIT, alignment=UNIT, pairs=listed, drafting=drafting)
    prompt_tokens = data.draw(st.integers(0, MAX_UNITS * UNIT + 1))
    units = prompt_tokens // UNIT
    residencies = data.draw(st.lists(st.integers(0, 3) | st.just(3), min_size=units, max_size=units))
    assert reached(known, residencies, prompt_tokens).tokens == hit_rule.fine_hit(known, residencies, prompt_tokens)


@given(st.lists(st.integers(0, 3), max_size=MAX_UNITS), st.integers(0, MAX_UNITS - 1), st.integers(0, 40))
def test_more_cached_blocks_never_shorten_a_hit(residencies: list[int], at: int, prompt_tokens: int) -> None:
    """For one full group another block, or another tier of one, leaves the hit as long or makes it longer."""
    known = profile(pairs=pairs((FULL, "gpu"), (FULL, "host")))
    more = [*residencies]
    if at < len(more):
        more[at] |= 1
    for walk in ("mixed", "device_then_lower"):
        rules = make_rules(_walking(known, walk))
        before = reusable_tokens(runs_of(residencies), rules, prompt_tokens).tokens
        assert reusable_tokens(runs_of(more), rules, prompt_tokens).tokens >= before


def _walking(known: Profile, walk: str) -> Profile:
    walks: dict[str, Literal["mixed", "device_then_lower"]] = {
        "mixed": "mixed",
        "device_then_lower": "device_then_lower",
    }
    return profile(pairs=known.pairs, tier_walk=walks[walk], tiers=tiers("gpu", "host"))


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_a_hit_is_within_the_prompt_and_aligned(data: st.DataObject) -> None:
    """No hit is negative, covers the last token, or is off the alignment, whatever the runs are."""
    known = data.draw(profiles())
    residencies, prompt_tokens = data.draw(holdings(known))
    found = reached(known, residencies, prompt_tokens).tokens
    assert 0 <= found <= max(0, prompt_tokens - 1)
    assert found % make_rules(known).alignment == 0
