"""Removals that take what is below along, and moves between tiers (DESIGN 4.9, 4.10). Blocks have four tokens."""

from typing import Any

from relays.cache.block_table import Limits
from relays.engine_events import Moved
from relays.mirror import Mirror
from tests.support.engines import chain, drain, profile, removed, resident, stored, tokens

A, B, C = chain(tokens(3))
SIDE = chain([*tokens(1), 90, 91, 92, 93])[1]


def cascading(**changes: Any) -> Mirror:
    return Mirror(profile(cascade=True, removal="one_for_all_tiers", **changes))


def tree(**changes: Any) -> Mirror:
    """Return a mirror that holds 1, below it 2 and then 3, and beside those 4."""
    mirror = cascading(**changes)
    mirror.apply([stored([1, 2, 3], tokens(3)), stored([4], [90, 91, 92, 93], parent=1)])
    return mirror


def test_a_removal_ends_what_is_below() -> None:
    """The topmost block is named; all its descendants go with it, and its ancestors stay."""
    mirror = tree()
    assert resident(mirror) == {A: 1, B: 1, C: 1, SIDE: 1}
    mirror.apply([removed(2)])
    assert resident(mirror) == {A: 1, SIDE: 1}
    mirror.apply([removed(1)])
    assert resident(mirror) == {}
    assert (mirror.blocks, mirror.nodes) == (0, 0)
    assert mirror.counts["removal_unknown"] == 0


def test_without_cascade_a_removal_ends_the_named_block_alone() -> None:
    """Where every block is listed the children stay until they are."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2, 3], tokens(3))])
    mirror.apply([removed(1)])
    assert resident(mirror) == {B: 1, C: 1}


def test_it_is_one_removal_of_each_descendant() -> None:
    """Where copies are counted, a block that was stored twice is still there after one cascade."""
    mirror = Mirror(profile(cascade=True))
    mirror.apply([stored([1, 2], tokens(2)), stored([1], tokens(1)), stored([2], tokens(1, first=5), parent=1)])
    mirror.apply([removed(1)])
    assert resident(mirror) == {A: 1, B: 1}
    mirror.apply([removed(1)])
    assert resident(mirror) == {}


def test_a_list_of_everything_ends_everything_once() -> None:
    """An engine that names descendants too is heard as well, root first or leaf first."""
    for names in ((1, 2, 3, 4), (3, 4, 2, 1), (2, 1)):
        mirror = tree()
        mirror.apply([removed(*names)])
        assert resident(mirror) == {}


def test_a_block_in_a_lower_tier_goes_too() -> None:
    """Wherever a descendant was moved to, it hangs on its ancestors."""
    mirror = tree()
    mirror.apply([Moved(hashes=(3,), before="gpu", tier="host")])
    assert resident(mirror) == {A: 1, B: 1, C: 2, SIDE: 1}
    mirror.apply([removed(2)])
    assert resident(mirror) == {A: 1, SIDE: 1}


def test_what_is_stored_again_has_no_old_descendants() -> None:
    """A block that comes back comes alone."""
    mirror = tree()
    mirror.apply([removed(1)])
    mirror.apply([stored([1], tokens(1))])
    assert resident(mirror) == {A: 1}


def test_a_block_below_an_unknown_one_is_not_kept() -> None:
    """The end of any of its ancestors may be its own unnamed end, so it does not wait for one to be told again."""
    mirror = cascading()
    mirror.apply([stored([3], tokens(1, first=9), parent=2)])
    mirror.apply([stored([1, 2], tokens(2))])
    assert resident(mirror) == {A: 1, B: 1}
    assert (mirror.blocks, mirror.pending_blocks) == (2, 0)
    assert mirror.counts["parent_unknown"] == 1


def test_a_block_of_an_unknown_namespace_is_not_kept_either() -> None:
    """Nothing could end it, were it kept; what is below it has an unknown parent."""
    mirror = cascading()
    mirror.apply([stored([1], [], namespace_known=False), stored([2], tokens(1, first=5), parent=1)])
    assert (mirror.blocks, resident(mirror)) == (0, {})
    assert mirror.counts == {"namespace_unknown": 1, "parent_unknown": 1}


def test_a_removed_block_takes_along_what_two_names_claim() -> None:
    """A descendant that two engine hashes name is gone under both."""
    mirror = tree()
    mirror.apply([stored([22], tokens(1, first=5), parent=1)])
    assert mirror.ambiguous_blocks == 1
    mirror.apply([removed(1)])
    assert (mirror.blocks, mirror.nodes) == (0, 0)


def test_a_long_chain_ends_in_one_step() -> None:
    """A chain of ten thousand blocks goes with its root, and listing it whole costs no more."""
    names = list(range(1, 10_001))
    for told in ([1], names, names[::-1]):
        mirror = cascading()
        mirror.apply([stored(names, tokens(len(names)))])
        drain(mirror)
        mirror.apply([removed(*told)])
        assert mirror.blocks == 0
        assert set(drain(mirror).values()) == {0}
        assert mirror.nodes == 0


# ---- moves


def test_a_move_is_one_change() -> None:
    """A block that changes its tier is told once, with its new residency, and was never gone (case A11)."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    assert drain(mirror) == {A: 1}
    mirror.apply([Moved(hashes=(1,), before="gpu", tier="host")])
    assert drain(mirror) == {A: 2}
    mirror.apply([Moved(hashes=(1,), before="host", tier="gpu")])
    assert drain(mirror) == {A: 1}


def test_a_move_concerns_one_copy() -> None:
    """Of two copies in a tier one stays."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1))])
    mirror.apply([Moved(hashes=(1,), before="gpu", tier="host")])
    assert resident(mirror) == {A: 3}
    mirror.apply([removed(1)])
    assert resident(mirror) == {A: 2}


def test_a_move_of_what_is_not_known_concludes_nothing() -> None:
    """An unknown block, a tier that it was not in, or an unknown group changes nothing and is counted."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    mirror.apply([Moved(hashes=(9,), before="gpu", tier="host"), Moved(hashes=(1,), before="disk", tier="host")])
    mirror.apply([Moved(hashes=(1,), before="gpu", tier="host", group=5)])
    assert resident(mirror) == {A: 1}
    assert mirror.counts["move_unknown"] == 3


def test_a_move_keeps_to_the_bound_of_blocks() -> None:
    """A block that is there already needs no more room for its new tier."""
    mirror = Mirror(profile(), limits=Limits(blocks=1))
    mirror.apply([stored([1], tokens(1)), Moved(hashes=(1,), before="gpu", tier="host")])
    assert resident(mirror) == {A: 2}
    assert mirror.counts["limit_blocks"] == 0


# ---- windows


def test_several_windows_are_an_upper_bound() -> None:
    """One window's events say nothing of the others', and the profile says so."""
    mirror = Mirror(profile())
    mirror.learn_windows((4096,))
    assert (mirror.profile.window_sizes, mirror.profile.upper_bound) == ((4096,), False)
    mirror.learn_windows((4096, 256))
    assert (mirror.profile.window_sizes, mirror.profile.upper_bound) == ((4096, 256), True)
