"""The mirror counts copies and applies events in order (DESIGN 4.1, 4.2, 4.9). Blocks have four tokens."""

import pytest

from relays.engine_events import EngineEvent, Removed
from relays.mirror import Mirror
from tests.support.engines import chain, drain, profile, removed, resident, stored, tiers, tokens

A, B = chain(tokens(2))


def test_a_block_stored_twice_is_there_after_one_removal() -> None:
    """Two physical copies of one hash need two removals (case B04)."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2], tokens(2)), stored([2], tokens(1, first=5), parent=1)])
    mirror.apply([removed(2)])
    assert resident(mirror) == {A: 1, B: 1}
    mirror.apply([removed(2)])
    assert resident(mirror) == {A: 1}


def test_copies_are_counted_for_each_tier() -> None:
    """A copy on the host outlives the GPU's, and the block's residency says where it is."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1), tier="host")])
    assert resident(mirror) == {A: 3}
    mirror.apply([removed(1)])
    assert resident(mirror) == {A: 2}
    mirror.apply([removed(1, tier="host")])
    assert resident(mirror) == {}


def test_a_removal_concerns_its_own_tier_and_group() -> None:
    """Removing a copy that was never stored there changes nothing and is counted."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([removed(1, tier="host"), removed(1, group=3), removed(9)])
    assert resident(mirror) == {A: 1}
    assert mirror.counts["removal_unknown"] == 3


def test_events_of_a_batch_are_applied_in_their_order() -> None:
    """Removed and stored leaves the block there, stored and removed does not."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([removed(1), stored([1], tokens(1))])
    assert resident(mirror) == {A: 1}
    mirror.apply([stored([2], tokens(1, first=5), parent=1), removed(2)])
    assert resident(mirror) == {A: 1}


@pytest.mark.parametrize("removed_first", [False, True])
def test_a_move_inside_a_batch_is_one_change(removed_first: bool) -> None:
    """A block that goes from one tier to another in a batch is told once, with its new residency (case B10)."""
    mirror = Mirror(profile(hash_only_stores=True))
    mirror.apply([stored([1], tokens(1))])
    assert drain(mirror) == {A: 1}
    move: list[EngineEvent] = [stored([1], [], tier="host", block_size=0), removed(1)]
    mirror.apply(move[::-1] if removed_first else move)
    assert drain(mirror) == {A: 2}


def test_a_block_that_came_and_went_unseen_is_never_told() -> None:
    """What was stored and removed between two drains is not news."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([removed(1)])
    assert not mirror.changed
    assert mirror.nodes == 0


def test_one_removal_may_end_all_copies() -> None:
    """With `one_for_copies` a removal drops every copy of the tier, and leaves the other tiers."""
    mirror = Mirror(profile(removal="one_for_copies"))
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1)), stored([1], tokens(1), tier="host")])
    mirror.apply([removed(1)])
    assert resident(mirror) == {A: 2}


def test_one_removal_may_end_the_block_in_all_tiers() -> None:
    """With `one_for_all_tiers` any removal ends the block everywhere."""
    mirror = Mirror(profile(removal="one_for_all_tiers"))
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1), tier="host"), stored([1], tokens(1), tier="disk")])
    mirror.apply([removed(1, tier="disk")])
    assert resident(mirror) == {}


@pytest.mark.parametrize(("remaining", "left"), [((2,), {A: 1}), ((1,), {A: 1}), ((0,), {})])
def test_a_dialects_own_count_replaces_ours(remaining: tuple[int, ...], left: dict[int, int]) -> None:
    """Where an event says how many copies are left, that many are left."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([Removed(hashes=(1,), remaining=remaining)])
    assert resident(mirror) == left
    for _ in range(sum(remaining)):
        mirror.apply([removed(1)])
    assert resident(mirror) == {}


def test_a_count_that_is_left_is_its_own_blocks() -> None:
    """Where a removal takes descendants along and says how many copies are left, the descendants just go."""
    mirror = Mirror(profile(cascade=True))
    mirror.apply([stored([1, 2], tokens(2))])
    mirror.apply([Removed(hashes=(1,), remaining=(0,))])
    assert resident(mirror) == {}


def test_a_hit_that_is_announced_again_is_no_copy() -> None:
    """With `re_announces_hits` a repeated store counts once, so one removal ends it (kv_cache_report_mode=full)."""
    mirror = Mirror(profile(re_announces_hits=True))
    mirror.apply([stored([1, 2], tokens(2)), stored([1, 2], tokens(2)), stored([1, 2], tokens(2))])
    mirror.apply([removed(2)])
    assert resident(mirror) == {A: 1}


def test_a_tier_that_is_read_in_chunks_counts_whole_ones() -> None:
    """Of a chunk of two blocks the last stands for both; half a chunk earns nothing (DESIGN 4.12)."""
    mirror = Mirror(profile(tiers=tiers("gpu", "host", chunk=2), hash_only_stores=True))
    mirror.apply([stored([1, 2, 3], tokens(3))])
    mirror.apply([stored([1, 2], [], tier="host", block_size=0), stored([3], [], tier="host", block_size=0)])
    assert resident(mirror) == {A: 1, B: 3, chain(tokens(3))[2]: 1}
    mirror.apply([removed(1, 2, tier="host")])
    assert resident(mirror) == dict.fromkeys(chain(tokens(3)), 1)


def test_the_engines_table_is_what_was_counted() -> None:
    """The mirror gives back each tier's (group, engine hash) pairs, placed or not."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1)), stored([7], tokens(1), parent=99), stored([1], tokens(1), tier="host")])
    assert set(mirror.engine_table("gpu")) == {(0, 1), (0, 7)}
    assert set(mirror.engine_table("host")) == {(0, 1)}
    assert mirror.blocks == 2
