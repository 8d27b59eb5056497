"""The mirror keeps cache groups apart and ANDs those of one class (DESIGN 4.6, 4.13). The unit is four tokens."""

import pytest

from index.hashing import Media
from relays.engine_events import MediaKey
from relays.mirror import Mirror
from schemas.profiles import MAX_PAIRS, Group, GroupClass, Pair
from tests.support.engines import FULL, chain, drain, pairs, profile, removed, resident, stored, tokens

A, B, C, D = chain(tokens(4))
STATE = GroupClass("state", None, 8)

# a full group with blocks of four, a state group with blocks of eight; the engine's hash of 8 tokens is `2` in both
MIXED = profile(Group(0, "full", 4), Group(1, "state", 8), pairs=pairs((FULL, "gpu"), (STATE, "gpu")))


def test_groups_of_one_class_are_there_only_together() -> None:
    """A block counts for a class once every group of the class has it, and no longer once one lost it."""
    windows = profile(Group(0, "window", 4, 8), Group(1, "window", 4, 8))
    mirror = Mirror(windows)
    mirror.apply([stored([1], tokens(1), group=0)])
    assert resident(mirror) == {}
    mirror.apply([stored([1], tokens(1), group=1)])
    assert resident(mirror) == {A: 1}
    mirror.apply([removed(1, group=0)])
    assert resident(mirror) == {}


def test_a_larger_block_is_marked_at_its_last_unit() -> None:
    """A state over eight tokens marks the second of two units with its own bit."""
    mirror = Mirror(MIXED)
    mirror.apply([stored([1, 2], tokens(2)), stored([2], tokens(2), group=1, block_size=8)])
    assert resident(mirror) == {A: 1, B: 3}


@pytest.mark.parametrize("masked_first", [True, False])
def test_a_masked_store_is_placed_by_another_groups_event(masked_first: bool) -> None:
    """A store that names one block of its range is placed where a full group's event puts that hash."""
    mirror = Mirror(MIXED)
    masked = stored([4], tokens(4), group=1, block_size=8)
    full = stored([1, 2, 3, 4], tokens(4))
    mirror.apply([masked, full] if masked_first else [full, masked])
    assert resident(mirror) == {A: 1, B: 1, C: 1, D: 3}
    mirror.apply([removed(4, group=1)])
    assert resident(mirror) == dict.fromkeys([A, B, C, D], 1)


def test_a_masked_store_alone_earns_nothing() -> None:
    """Without another group's event nobody knows which block of the range it names: cold, counted."""
    mirror = Mirror(MIXED)
    mirror.apply([stored([4], tokens(4), group=1, block_size=8)])
    assert resident(mirror) == {}
    assert mirror.counts["masked_unplaced"] == 1


def test_a_masked_store_is_not_taken_for_the_start_of_its_range() -> None:
    """A masked store with no parent, one hash and two blocks of tokens is no root block."""
    mirror = Mirror(profile())
    mirror.apply([stored([2], tokens(2))])
    assert resident(mirror) == {}


def test_a_masked_store_of_no_blocks_teaches_its_group() -> None:
    """An event without hashes still says which group there is, and of what kind."""
    mirror = Mirror(profile(Group(0, "full", 4)))
    mirror.apply([stored([], tokens(2), group=1, group_spec=Group(1, "window", 4, 8))])
    assert mirror.profile.groups == (Group(0, "full", 4), Group(1, "window", 4, 8))


def test_a_block_of_a_group_that_says_nothing_of_itself_is_full() -> None:
    """Before 0.22 a group is learnt as full attention with its event's block size."""
    mirror = Mirror(profile(Group(0, "full", 4)))
    mirror.apply([stored([1, 2], tokens(2), group=2)])
    assert mirror.profile.groups[-1] == Group(2, "full", 4)


def test_a_group_learnt_later_takes_back_what_its_class_was_credited() -> None:
    """Blocks told while one group of a class was known are told again, without its bit, once a second one shows."""
    mirror = Mirror(profile(Group(0, "full", 4)))
    one, two = Group(1, "window", 4, 8), Group(2, "window", 4, 8)
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1), group=1, group_spec=one)])
    assert drain(mirror) == {A: 3}
    mirror.apply([stored([2], tokens(1, first=5), parent=1, group=2, group_spec=two)])
    told = drain(mirror)
    assert resident(mirror)[A] == 1
    assert told[A] == 1


def test_hashes_of_an_unknown_group_earn_nothing() -> None:
    """A hash-only store of a group that was never described is counted."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], [], group=5, block_size=0)])
    assert (mirror.blocks, mirror.counts["group_unknown"]) == (0, 1)


def test_a_seventeenth_pair_earns_nothing() -> None:
    """When all sixteen residency bits are taken another (class, tier) pair is counted and left out."""
    windows = [Group(n, "window", 4, n) for n in range(1, MAX_PAIRS)]
    taken = tuple(Pair(group.group_class, "gpu") for group in windows)
    mirror = Mirror(profile(Group(0, "full", 4), *windows, pairs=taken))
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1), tier="host")])
    assert resident(mirror) == {A: 1 << (MAX_PAIRS - 1)}
    assert mirror.counts["pairs_exhausted"] == 1


PARTIAL = profile(Group(0, "full", 16), Group(1, "state", 16), alignment=4)


def test_a_partial_block_is_marked_where_it_ends() -> None:
    """Behind a whole block of sixteen tokens an entry of four marks the fifth unit (DESIGN 4.13)."""
    mirror = Mirror(PARTIAL)
    mirror.apply([stored([4], tokens(4), block_size=16), stored([5], tokens(1, first=17), parent=4)])
    five = chain(tokens(5))
    assert resident(mirror) == {five[3]: 1, five[4]: 1}


def test_a_partial_block_whose_parent_was_never_told_is_unknown() -> None:
    """An entry below a boundary that no event named earns nothing."""
    mirror = Mirror(PARTIAL)
    mirror.apply([stored([4], tokens(4), block_size=16), stored([6], tokens(1, first=21), parent=5)])
    assert resident(mirror) == {chain(tokens(4))[3]: 1}


def test_a_partial_block_is_promoted_to_a_whole_one() -> None:
    """Removal of the partial hash and store of the whole one leave the whole block alone."""
    mirror = Mirror(PARTIAL)
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([removed(1), stored([4], tokens(4), block_size=16)])
    assert resident(mirror) == {D: 1}


def test_media_enter_each_block_as_its_event_lists_them() -> None:
    """An image over the second and third block gives the hashes that a prompt with that image has."""
    mirror = Mirror(profile())
    keys = ((), (MediaKey("img", 1),), (MediaKey("img", -3),), ())
    mirror.apply([stored([1, 2, 3, 4], tokens(4), media=keys)])
    assert resident(mirror) == dict.fromkeys(chain(tokens(4), media=[Media("img", 5, 7)]), 1)


def test_media_in_a_larger_block_do_not_move_its_units() -> None:
    """A group of larger blocks and one of smaller ones place one prompt with an image alike."""
    mirror = Mirror(MIXED)
    image = MediaKey("img", 0)  # over the first four tokens
    fine = stored([1, 2], tokens(2), media=((image,), ()))
    coarse = stored([2], tokens(2), group=1, block_size=8, media=((image,),))
    mirror.apply([fine, coarse])
    one, two = chain(tokens(2), media=[Media("img", 0, 4)])
    assert resident(mirror) == {one: 1, two: 3}
