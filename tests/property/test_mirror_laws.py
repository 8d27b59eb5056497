"""Laws of the mirror, and of the index that hears it."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from relays.cache.block_table import Limits
from relays.engine_events import EngineEvent, Removed, Stored
from relays.mirror import Mirror
from schemas.profiles import Profile
from tests.support.coroutines import immediate
from tests.support.engines import HOLDER, drain, profile
from tests.support.replayed import Row, memory_store, tell
from tests.support.stories import configured, flat, honest_stores, removals, stories

NOTHING_KNOWN = msgspec.structs.replace(profile(clear_scope="device"), unit=0, groups=())

PROFILES: list[Profile] = [
    configured(clear_scope="device"),
    configured(clear_scope="all"),
    configured(clear_scope="device_then_host", hash_only_stores=True),
    configured(clear_scope="device", hash_only_stores=True, re_announces_hits=True),
    configured(removal="one_for_copies"),
    configured(removal="one_for_all_tiers", hash_only_stores=True),
    configured(cascade=True, clear_scope="all"),
    configured(cascade=True, clear_scope="device", hash_only_stores=True),
]


@given(st.sampled_from(PROFILES), stories(), st.data())
@settings(max_examples=200, deadline=None)
def test_the_index_hears_what_the_mirror_holds(
    known: Profile, story: list[list[EngineEvent]], data: st.DataObject
) -> None:
    """After any events, drained now and then, the memory store's digest equals the mirror's."""
    row, store = Row(known), memory_store()
    for batch in story:
        row.apply(batch)
        if data.draw(st.booleans(), label="drain"):
            tell(store, row.speak())
            assert immediate(store.digest("m", HOLDER)) == row.digest
    tell(store, row.speak())
    assert immediate(store.digest("m", HOLDER)) == row.digest


@given(stories())
@settings(max_examples=150, deadline=None)
def test_the_index_follows_groups_that_are_learnt(story: list[list[EngineEvent]]) -> None:
    """Digests stay equal where groups, pairs and unit are learnt from the events on the way."""
    row, store = Row(NOTHING_KNOWN), memory_store()
    for batch in story:
        row.apply(batch)
        tell(store, row.speak())
        assert immediate(store.digest("m", HOLDER)) == row.digest


@given(st.lists(honest_stores(), min_size=1, max_size=8), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_store_is_taken_back_exactly_by_its_removal(told: list[Stored], random: object, drained: bool) -> None:
    """Removing every announced copy once, in any order, brings the mirror back to empty."""
    mirror = Mirror(configured())
    for event in told:
        mirror.apply([event])
        if drained:
            drain(mirror)
    undo: list[Removed] = flat([removals(event) for event in told])  # type: ignore[assignment]
    random.shuffle(undo)  # type: ignore[attr-defined]
    for removal in undo:
        mirror.apply([removal])
        if drained:
            drain(mirror)
    drain(mirror)
    assert (mirror.nodes, mirror.blocks, mirror.pending_blocks, mirror.ambiguous_blocks) == (0, 0, 0, 0)
    assert mirror.counts["removal_unknown"] == 0


@given(stories())
@settings(max_examples=150, deadline=None)
def test_a_mirror_holds_no_more_than_its_limits(story: list[list[EngineEvent]]) -> None:
    """Whatever is told, a mirror stays within its bounds and still agrees with its index."""
    limits = Limits(blocks=6, idle_hashes=3, pending_blocks=4)
    row, store = Row(configured(hash_only_stores=True, clear_scope="device"), limits=limits), memory_store()
    for batch in story:
        row.apply(batch)
        assert row.mirror.blocks <= limits.blocks + limits.idle_hashes
        assert row.mirror.pending_blocks <= limits.pending_blocks
    tell(store, row.speak())
    assert immediate(store.digest("m", HOLDER)) == row.digest


@given(stories())
@settings(max_examples=100, deadline=None)
def test_saying_again_brings_a_new_index_to_the_same_digest(story: list[list[EngineEvent]]) -> None:
    """An index that hears only what a relay says again holds what the mirror holds."""
    row = Row(configured(clear_scope="device"))
    for batch in story:
        row.apply(batch)
        row.speak()
    row.mirror.say_again()
    row.voice = type(row.voice)(HOLDER, 2)
    store = memory_store()
    tell(store, row.speak())
    assert immediate(store.digest("m", HOLDER)) == row.digest
