"""What events do not say of a namespace is doubt, and doubt is cold (DESIGN 4.13, 4.14). Blocks have four tokens."""

from relays.engine_events import EngineHash, Stored
from relays.mirror import Mirror
from tests.support.engines import chain, drain, profile, removed, resident, stored, tokens

A, B, C = chain(tokens(3))
HIDDEN = profile(hidden_namespaces=("salt",))


class Names:
    """A hash check whose engine calls a prompt's unsalted first block 1."""

    def first_block(self, stored: Stored) -> EngineHash | None:
        return 1


def test_adapter_and_salt_are_namespaces_of_their_own() -> None:
    """Equal tokens under an adapter, under a salt and under none are three blocks (case A04)."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1)), stored([2], tokens(1), adapter="a"), stored([3], tokens(1), salt="a")])
    expected = [A, *chain(tokens(1), adapter="a"), *chain(tokens(1), salt="a")]
    assert resident(mirror) == dict.fromkeys(expected, 1)


def test_later_blocks_inherit_their_parents_namespace() -> None:
    """A block below a salted one needs no salt of its own, for our chain carries it."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1), salt="t"), stored([2], tokens(1, first=5), parent=1)])
    assert resident(mirror) == dict.fromkeys(chain(tokens(2), salt="t"), 1)


def test_an_adapter_that_cannot_be_named_earns_nothing() -> None:
    """Blocks whose adapter is only a number nobody knows match no prompt, nor do their descendants (case A03)."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1), namespace_known=False), stored([2], tokens(1, first=5), parent=1)])
    assert resident(mirror) == {}
    assert mirror.counts["namespace_unknown"] == mirror.counts["namespace_hidden"] == 1
    assert mirror.blocks == 2


def test_two_hashes_for_one_block_are_ambiguous_and_cold() -> None:
    """Where two live engine hashes claim one block neither is credited, and the index is told so."""
    mirror = Mirror(HIDDEN)
    mirror.apply([stored([1], tokens(1))])
    assert drain(mirror) == {A: 1}
    mirror.apply([stored([2], tokens(1))])
    assert resident(mirror) == {}
    assert drain(mirror) == {A: 0}
    assert mirror.ambiguous_blocks == 1
    assert mirror.is_ambiguous([A])


def test_ambiguity_ends_with_one_of_the_two() -> None:
    """Once one of the two hashes is gone the other is credited again."""
    mirror = Mirror(HIDDEN)
    mirror.apply([stored([1], tokens(1)), stored([2], tokens(1))])
    mirror.apply([removed(1)])
    assert resident(mirror) == drain(mirror) == {A: 1}
    assert mirror.ambiguous_blocks == 0


def test_ambiguity_is_of_one_tier() -> None:
    """Two hashes in two tiers do not claim the same copies."""
    mirror = Mirror(HIDDEN)
    mirror.apply([stored([1], tokens(1)), stored([2], tokens(1), tier="host")])
    assert resident(mirror) == {A: 3}
    assert mirror.ambiguous_blocks == 0


def test_the_hash_check_keeps_a_hidden_salt_out() -> None:
    """A first block that the engine names otherwise is of a namespace not told, and so is all below it."""
    mirror = Mirror(HIDDEN, hash_check=Names())
    salted = [stored([8, 9], tokens(2)), stored([10], tokens(1, first=9), parent=9)]
    mirror.apply([stored([1, 2], tokens(2)), *salted])
    assert resident(mirror) == {A: 1, B: 1}
    assert mirror.counts["namespace_hidden"] == 3
    assert mirror.ambiguous_blocks == 0


def test_without_the_hash_check_a_lone_salt_is_taken_for_none() -> None:
    """Nothing shows that a single hash is salted; the second one, of the plain prompt, makes both cold."""
    mirror = Mirror(HIDDEN)
    mirror.apply([stored([8], tokens(1))])
    assert resident(mirror) == {A: 1}
    mirror.apply([stored([1], tokens(1))])
    assert resident(mirror) == {}


def test_a_hidden_block_leaves_nothing_behind() -> None:
    """Removing blocks that match no prompt brings the mirror back to empty."""
    mirror = Mirror(HIDDEN, hash_check=Names())
    mirror.apply([stored([8, 9], tokens(2))])
    mirror.apply([removed(8, 9)])
    assert (mirror.nodes, mirror.blocks, mirror.pending_blocks) == (0, 0, 0)


def test_one_hash_for_two_blocks_credits_neither() -> None:
    """An engine hash that names two contents is cold while copies of it live, and the first one is retracted."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1))])
    drain(mirror)
    mirror.apply([stored([1], tokens(1, first=50))])
    assert resident(mirror) == {}
    assert drain(mirror) == {A: 0}
    assert mirror.counts["hash_names_two_blocks"] == 1


def test_a_hash_that_named_two_blocks_may_start_anew() -> None:
    """After its last copy is gone the hash is as good as any other."""
    mirror = Mirror(profile())
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1, first=50))])
    mirror.apply([removed(1), removed(1)])
    assert (mirror.nodes, mirror.blocks) == (0, 0)
    mirror.apply([stored([1], tokens(1))])
    assert resident(mirror) == {A: 1}


def test_a_contradiction_is_a_resident_block_under_another_name() -> None:
    """An event that would give a held block another engine hash contradicts; an equal or unknown one does not."""
    mirror = Mirror(profile(hidden_namespaces=("adapter_path",)))
    mirror.apply([stored([1, 2], tokens(2), adapter="a")])
    assert mirror.contradicts(stored([7], tokens(1), adapter="a"))
    assert mirror.contradicts(stored([1, 7], tokens(2), adapter="a"))
    assert not mirror.contradicts(stored([1, 2, 3], tokens(3), adapter="a"))
    assert not mirror.contradicts(stored([7], tokens(1), adapter="b"))
    assert not mirror.contradicts(stored([7], tokens(1), parent=1))
