"""Profiles: names, tiers, group classes, and what a residency bit means."""

import pytest

from schemas.errors import ProfileError
from schemas.profiles import (
    Group,
    GroupClass,
    Holder,
    ReplicaEntry,
    TierProfile,
    class_bits,
    decode_entry,
    encode_entry,
)
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


def test_the_bits_of_a_class_are_found_by_tier() -> None:
    """Each group class gets the bits of its own tiers."""
    bits = class_bits(pairs((FULL, "gpu"), (WINDOW, "gpu"), (FULL, "host")))
    assert bits == {FULL: {"gpu": 1, "host": 4}, WINDOW: {"gpu": 2}}


def test_groups_of_one_kind_window_and_size_are_one_class() -> None:
    """Two sliding-window groups that differ in their index only are found and lost by one rule."""
    assert Group(1, "window", 4, 8).group_class == Group(2, "window", 4, 8).group_class == WINDOW
    assert Group(1, "window", 4, 8).group_class != Group(1, "window", 4, 12).group_class


def test_an_entry_that_no_rule_can_reckon_with_is_none() -> None:
    """A block that is no whole number of units is refused where the registry is read, as it is in records."""
    entry = ReplicaEntry(7, profile())
    assert decode_entry(encode_entry(entry)) == entry
    with pytest.raises(ProfileError, match="not a multiple of the unit 4"):
        decode_entry(encode_entry(ReplicaEntry(7, profile(Group(0, "full", 6), unit=4))))
    with pytest.raises(ProfileError, match="unit"):
        decode_entry(encode_entry(ReplicaEntry(7, profile(unit=-1))))
