"""The mirror finds each block's place in our chains (DESIGN 4.3 to 4.5). Blocks have four tokens."""

import msgspec
import pytest

from relays.cache.block_table import Limits
from relays.engine_events import Stored
from relays.mirror import Mirror
from schemas.profiles import Group
from tests.support.engines import chain, drain, profile, removed, resident, stored, tokens

A, B, C, D = chain(tokens(4))


def singles(count: int) -> list[Stored]:
    """Return one store a block of a chain whose engine hashes count from 1."""
    return [stored([n + 1], tokens(1, first=1 + 4 * n), parent=n or None) for n in range(count)]


def test_a_block_is_known_by_our_hash_of_its_whole_prefix() -> None:
    """Blocks stored one after the other have the hashes that a caller computes for the prompt."""
    mirror = Mirror(profile())
    mirror.apply(singles(4))
    assert resident(mirror) == dict.fromkeys([A, B, C, D], 1)


def test_engines_that_name_blocks_differently_agree_on_ours() -> None:
    """Two mirrors fed with other engine hashes of equal tokens hold equal blocks (case B12)."""
    one, two = Mirror(profile()), Mirror(profile())
    one.apply([stored([1, 2], tokens(2))])
    two.apply([stored([b"x" * 32, b"y" * 32], tokens(2))])
    assert resident(one) == resident(two) == {A: 1, B: 1}


def test_a_block_with_an_unknown_parent_earns_nothing() -> None:
    """A child whose parent was never told is counted and kept, not taken for a root (case B08)."""
    mirror = Mirror(profile())
    mirror.apply([stored([2], tokens(1), parent=1)])
    assert resident(mirror) == {}
    assert drain(mirror) == {}
    assert (mirror.pending_blocks, mirror.counts["parent_unknown"]) == (1, 1)


def test_a_waiting_block_is_credited_when_its_parent_turns_up() -> None:
    """Grandchild, then child, then root: all three are known once the root is."""
    mirror = Mirror(profile())
    mirror.apply(reversed(singles(3)))
    assert resident(mirror) == dict.fromkeys([A, B, C], 1)
    assert mirror.pending_blocks == 0


def test_a_block_removed_while_it_waits_is_never_credited() -> None:
    """A pending block that the engine dropped stays gone when its parent turns up."""
    mirror = Mirror(profile())
    mirror.apply([singles(2)[1]])
    mirror.apply([removed(2)])
    mirror.apply([singles(1)[0]])
    assert resident(mirror) == {A: 1}
    assert (mirror.nodes, mirror.blocks) == (1, 1)


def test_nothing_waits_for_a_block_that_is_gone() -> None:
    """Removing a pending block ends its wait, so that it takes no room from others."""
    mirror = Mirror(profile())
    mirror.apply([singles(2)[1]])
    mirror.apply([removed(2)])
    assert mirror.pending_blocks == 0


def test_nothing_waits_for_a_block_that_another_group_placed_and_lost() -> None:
    """A block that waits by one group's store and is placed by another's waits no more once all copies are gone."""
    mirror = Mirror(profile(Group(0, "full", 4), Group(1, "state", 8)))
    mirror.apply([stored([2], tokens(1, first=5), parent=1), stored([2, 4], tokens(4), group=1, block_size=8)])
    mirror.apply([removed(2), removed(2, group=1)])
    mirror.apply([removed(4, group=1)])
    drain(mirror)
    assert (mirror.nodes, mirror.blocks, mirror.pending_blocks) == (0, 0, 0)


def test_a_copy_that_comes_back_while_waiting_is_credited_once() -> None:
    """A pending block stored twice and removed once is there when its parent turns up, and one removal ends it."""
    mirror = Mirror(profile())
    child = singles(2)[1]
    mirror.apply([child, child, removed(2), singles(1)[0]])
    assert resident(mirror) == {A: 1, B: 1}
    mirror.apply([removed(2)])
    assert resident(mirror) == {A: 1}


def test_what_waits_is_bounded_and_the_oldest_goes_first() -> None:
    """Past the bound the block that waited longest is forgotten, counted, and the newer ones are still placed."""
    mirror = Mirror(profile(), limits=Limits(pending_blocks=2))
    mirror.apply([stored([10 + n], tokens(1, first=100 * n), parent=n) for n in (1, 2, 3)])
    assert (mirror.pending_blocks, mirror.counts["pending_dropped"]) == (2, 1)
    mirror.apply([stored([n], tokens(1, first=1000 * n)) for n in (1, 2, 3)])
    placed = set(resident(mirror))
    expected = {block for n in (2, 3) for block in chain([*tokens(1, first=1000 * n), *tokens(1, first=100 * n)])}
    assert placed == expected | set(chain(tokens(1, first=1000)))


@pytest.mark.parametrize("blocks", [100, 20_000])
def test_a_long_chain_may_wait_for_its_root(blocks: int) -> None:
    """A conversation told block by block before its first block is placed whole, however long it is."""
    mirror = Mirror(profile())
    events = singles(blocks)
    mirror.apply(events[1:])
    assert mirror.pending_blocks == blocks - 1
    mirror.apply(events[:1])
    assert resident(mirror) == dict.fromkeys(chain(tokens(blocks)), 1)


def test_a_hole_is_told_and_refilled_in_place() -> None:
    """A block lost from the middle leaves its descendants known, and comes back at its own depth (case B09)."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2, 3], tokens(3))])
    drain(mirror)
    mirror.apply([removed(2)])
    assert drain(mirror) == {B: 0}
    assert resident(mirror) == {A: 1, C: 1}
    mirror.apply([stored([2], tokens(1, first=5), parent=1)])
    assert drain(mirror) == {B: 1}
    assert resident(mirror) == dict.fromkeys([A, B, C], 1)


def test_a_place_is_kept_while_descendants_are_resident() -> None:
    """A child stored below a parent that has no copy left, but a resident child, is placed (DESIGN 4.5)."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2], tokens(2))])
    mirror.apply([removed(1)])
    mirror.apply([stored([3], tokens(1, first=50), parent=1)])
    assert resident(mirror) == dict.fromkeys([B, chain([1, 2, 3, 4, 50, 51, 52, 53])[1]], 1)


def test_a_place_goes_with_the_last_copy_otherwise() -> None:
    """A parent without copies and descendants is forgotten: a child stored below it later waits."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([removed(1)])
    mirror.apply([stored([2], tokens(1, first=5), parent=1)])
    assert resident(mirror) == {}
    assert mirror.pending_blocks == 1


def test_a_host_copy_may_come_after_the_gpu_copy_went() -> None:
    """Where stores are hashes only a place outlives the last copy, so that a late host copy is found."""
    mirror = Mirror(profile(hash_only_stores=True))
    mirror.apply([stored([1, 2], tokens(2))])
    mirror.apply([removed(1, 2)])
    mirror.apply([stored([2], [], tier="host", block_size=0)])
    assert resident(mirror) == {B: 2}


def test_places_without_copies_are_bounded() -> None:
    """Past the bound the place that was idle longest is forgotten; a hash-only store of it earns nothing."""
    mirror = Mirror(profile(hash_only_stores=True), limits=Limits(idle_hashes=1))
    mirror.apply([stored([1], tokens(1)), stored([2], tokens(1, first=5))])
    mirror.apply([removed(1)])
    mirror.apply([removed(2)])
    mirror.apply([stored([1, 2], [], tier="host", block_size=0)])
    assert resident(mirror) == dict.fromkeys(chain(tokens(1, first=5)), 2)


def test_a_store_whose_block_is_no_multiple_of_the_unit_is_counted_out() -> None:
    """A block size that does not fit the unit earns nothing."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1, size=6), block_size=6)])
    assert resident(mirror) == {}
    assert mirror.counts["block_size_off_unit"] == 1


def test_a_group_whose_blocks_are_no_multiple_of_the_unit_is_not_taken_in() -> None:
    """An operator who names another block size than the engine has gets nothing, and a profile that can be read."""
    mirror = Mirror(msgspec.structs.replace(profile(unit=8), groups=()))
    mirror.apply([stored([1], tokens(1))])
    assert resident(mirror) == {}
    assert mirror.counts["block_size_off_unit"] == 1
    assert mirror.profile.groups == ()
    mirror.profile.check()


def test_the_unit_is_learnt_from_the_first_batch() -> None:
    """Without a configured unit it is what all block sizes of the first batch with tokens have in common."""
    mirror = Mirror(profile(unit=0, alignment=0))
    mirror.apply([stored([9], [], block_size=0)])
    mirror.apply([stored([1], tokens(1, size=8), block_size=8), stored([2], tokens(1, size=12), block_size=12)])
    assert mirror.profile.unit == 4


def test_a_secret_changes_every_block() -> None:
    """A deployment's secret enters the root, so hashes of two deployments never meet."""
    mirror = Mirror(profile(), secret=b"s")
    mirror.apply([stored([1], tokens(1))])
    assert set(resident(mirror)).isdisjoint([A])


def test_forgetting_leaves_nothing_and_tells_nothing() -> None:
    """A new life starts from an empty mirror; the index learns of it by the life's number."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2], tokens(2))])
    drain(mirror)
    mirror.forget()
    assert (mirror.nodes, mirror.blocks, mirror.changed) == (0, 0, False)


def test_saying_again_makes_everything_news() -> None:
    """After `say_again` a drain yields every block that is there, and nothing that is not."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2, 3], tokens(3))])
    drain(mirror)
    mirror.apply([removed(2)])
    mirror.say_again()
    assert drain(mirror) == {A: 1, C: 1}
    assert not mirror.changed
