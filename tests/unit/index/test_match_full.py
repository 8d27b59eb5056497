"""The hit rule with one full group: an unbroken prefix, never the last token. Blocks have four tokens."""

import pytest

from index.match import NOTHING, Reach
from index.rules import ANY_GAP, make_rules
from schemas.profiles import Group, GroupClass, Profile, TierProfile
from tests.support.engines import FULL, pairs, profile, tiers
from tests.support.hits import hit, reach

PLAIN = profile(pairs=pairs((FULL, "gpu")))
TIERED = profile(pairs=pairs((FULL, "gpu"), (FULL, "host"), (FULL, "disk")), tiers=tiers("gpu", "host", "disk"))

LENGTHS = [
    ("", 9, 0),
    ("1", 3, 0),  # the prompt ends inside the first block
    ("1", 4, 0),  # the last token is always computed, and with it its block
    ("1", 5, 4),
    ("11", 8, 4),
    ("11", 9, 8),
    ("1111", 9, 8),  # more is cached than the prompt is long
    (".111", 17, 0),
    ("1.11", 17, 4),
    ("11.1", 17, 8),
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "tokens"), LENGTHS)
def test_the_hit_is_the_unbroken_prefix_below_the_last_token(drawing: str, prompt_tokens: int, tokens: int) -> None:
    """A full group reuses whole blocks from the start up to the first hole, never the prompt's last token."""
    assert hit(PLAIN, drawing, prompt_tokens) == tokens


def test_a_whole_prompt_may_count_its_last_token_where_the_log_does() -> None:
    """With `whole_prompt` the last token's block counts as well."""
    assert reach(PLAIN, "11", 8, whole_prompt=True) == Reach(8, {"gpu": 8})


@pytest.mark.parametrize(("prompt_tokens", "tokens"), [(9, 4), (10, 8), (13, 8), (14, 12)])
def test_pairs_leave_out_the_last_token_before_they_are_made(prompt_tokens: int, tokens: int) -> None:
    """Of n tokens n - 1 are looked up, which are n - 2 pairs; a log of the look-up itself has n - 1."""
    eagle = profile(drafting="pairs", pairs=pairs((FULL, "gpu")))
    assert hit(eagle, "1111", prompt_tokens) == tokens
    assert reach(eagle, "1111", prompt_tokens - 1, whole_prompt=True).tokens == tokens


def test_a_load_below_the_least_is_computed_again() -> None:
    """What follows the device's part is loaded as a whole from `least_tokens` on, and below that not at all."""
    least = profile(
        pairs=pairs((FULL, "gpu"), (FULL, "host")), tiers=(TierProfile("gpu"), TierProfile("host", least_tokens=10))
    )
    assert reach(least, "1222", 17) == Reach(16, {"gpu": 4, "host": 12})
    assert reach(least, "122", 17) == Reach(4, {"gpu": 4})
    assert reach(least, "22", 17) is NOTHING
    assert reach(least, "122", 17, whole_prompt=True) == Reach(12, {"gpu": 4, "host": 8})


def test_nothing_reused_is_one_value() -> None:
    """A holder without the first block reaches NOTHING, which names no tier."""
    assert reach(PLAIN, ".1", 9) is NOTHING
    assert Reach(0, {}) == NOTHING


def test_tiers_may_alternate_along_a_mixed_run() -> None:
    """Where the engine reads any tier anywhere the run goes on, and each block counts under its fastest tier."""
    assert reach(TIERED, "1324.1", 33) == Reach(16, {"gpu": 8, "host": 4, "disk": 4})


def test_a_block_in_several_tiers_counts_under_the_fastest() -> None:
    """A copy in a slower tier changes nothing while a faster one is there."""
    assert reach(TIERED, "7765", 17).by_tier == {"gpu": 12, "host": 4}


def test_a_hit_is_a_multiple_of_the_alignment() -> None:
    """With an alignment of two blocks an odd block at the end is not reused."""
    aligned = profile(alignment=8, pairs=pairs((FULL, "gpu")))
    assert [hit(aligned, "1" * n, 99) for n in range(5)] == [0, 0, 8, 8, 16]


def test_a_larger_block_is_marked_at_its_last_unit() -> None:
    """A group whose block is two units has it where the second unit is marked; the first need not be."""
    eight = GroupClass("full", None, 8)
    wide = profile(Group(0, "full", 8), pairs=pairs((eight, "gpu")))
    assert hit(wide, ".1.1", 17) == 16
    assert hit(wide, ".1.1", 16) == 8
    assert hit(wide, "1", 17) == 0


def test_a_group_that_never_stored_anything_agrees_to_nothing() -> None:
    """A profile that names a class without any residency bit gives no hit."""
    silent = profile(Group(0, "full", 4), Group(1, "state", 4), pairs=pairs((FULL, "gpu")))
    assert reach(silent, "1111", 17) is NOTHING


def upper_bound(policy: str) -> Profile:
    return profile(pairs=pairs((FULL, "gpu")), upper_bound=True, upper_bound_policy=policy)


def test_an_upper_bound_is_marked_or_treated_as_gone() -> None:
    """An engine that does not report all classes is credited with a mark, or not at all, as its policy says."""
    assert reach(upper_bound("credit"), "11", 9) == Reach(8, {"gpu": 8}, upper_bound=True)
    assert reach(upper_bound("gone"), "11", 9) is NOTHING


GAPS = [
    (profile(pairs=pairs((FULL, "gpu"))), 0),
    (profile(Group(0, "full", 16), pairs=pairs((GroupClass("full", None, 16), "gpu"))), 3),
    (profile(Group(0, "full", 4), Group(1, "full", 12)), 2),
    (profile(Group(0, "window", 4, 8)), ANY_GAP),
    (profile(tiers=tiers("gpu", "host", chunk=3), tier_walk="device_then_lower"), 2),
]


@pytest.mark.parametrize(("known", "gap"), GAPS)
def test_the_gap_is_how_far_apart_a_full_groups_marks_may_lie(known: Profile, gap: int) -> None:
    """Marks lie a block, or a chunk, apart; without a full group any stretch may be empty."""
    assert make_rules(known).gap == gap
