"""Profiles: what a residency bit means, and facts that contradict each other."""

import pytest

from schemas.errors import ProfileError
from schemas.profiles import MAX_PAIRS, Group, GroupClass, Holder, Pair, TierProfile, class_bits
from tests.support.engines import FULL, pairs, profile, tiers

WINDOW = GroupClass("window", 8, 4)


def test_a_holder_is_written_as_replica_and_rank_or_as_the_pools_name() -> None:
    """A rank of a replica reads `name/rank`, a pool its name alone."""
    assert str(Holder("r3", 0)) == "r3/0"
    assert str(Holder("node7", None)) == "node7"


def test_a_tier_that_is_not_listed_behaves_plainly() -> None:
    """An unlisted tier has chunks of one block, no capacity and announces removals."""
    known = profile(tiers=tiers("gpu", "host", chunk=3))
    assert known.tier("host").chunk == 3
    assert known.tier("disk") == TierProfile("disk")


def test_the_position_of_a_pair_is_its_bit() -> None:
    """Pairs count from the lowest bit, and a pair that is not listed has none."""
    known = profile(pairs=pairs((FULL, "gpu"), (WINDOW, "gpu"), (FULL, "host")))
    assert [known.pair_bit(pair) for pair in known.pairs] == [1, 2, 4]
    assert known.pair_bit(Pair(WINDOW, "host")) == 0


def test_the_bits_of_a_class_are_found_by_tier() -> None:
    """Each group class gets the bits of its own tiers."""
    bits = class_bits(pairs((FULL, "gpu"), (WINDOW, "gpu"), (FULL, "host")))
    assert bits == {FULL: {"gpu": 1, "host": 4}, WINDOW: {"gpu": 2}}


def test_groups_of_one_kind_window_and_size_are_one_class() -> None:
    """Two sliding-window groups that differ in their index only are found and lost by one rule."""
    assert Group(1, "window", 4, 8).group_class == Group(2, "window", 4, 8).group_class == WINDOW
    assert Group(1, "window", 4, 8).group_class != Group(1, "window", 4, 12).group_class


def test_a_sound_profile_passes_its_check() -> None:
    """A profile whose facts fit together is accepted."""
    profile(Group(0, "full", 8), Group(1, "window", 4, 8), alignment=8).check()


CONTRADICTIONS = {
    "alignment": profile(alignment=6),
    "alignment of nothing": profile(),
    r"groups\[2\].block_size": profile(Group(2, "full", 6), alignment=4),
    r"groups\[0\].window: None": profile(Group(0, "window", 4), alignment=4),
    r"groups\[0\].window: 8": profile(Group(0, "full", 4, 8), alignment=4),
    "pairs: 17": profile(
        alignment=4, pairs=tuple(Pair(GroupClass("window", n, 4), "gpu") for n in range(MAX_PAIRS + 1))
    ),
}


@pytest.mark.parametrize("place", CONTRADICTIONS)
def test_facts_that_contradict_each_other_are_refused_by_name(place: str) -> None:
    """A contradiction raises ProfileError that names the field."""
    with pytest.raises(ProfileError, match=place.removesuffix(" of nothing")):
        CONTRADICTIONS[place].check()
