"""The simulated SGLang cache on the device: a radix tree of pages, its splits, locks and evictions."""

import pytest

from ops.simulator.sglang.pages import Namespace
from tests.support.sglang_cache import SIZE, cache_of, fill, key, told


def test_a_hit_is_the_longest_run_of_whole_pages() -> None:
    """Pages from the first on, as far as they are equal; a page alone is none."""
    cache = cache_of()
    fill(cache, 1, 2, 3)
    assert cache.match(key(1, 2, 4)).device_pages == 2
    assert cache.match(key(2, 3)).device_pages == 0


def test_a_new_part_is_told_with_what_stands_before_it() -> None:
    """Only what was not there is stored; its parent is the page before."""
    cache = cache_of()
    fill(cache, 1, 2)
    fill(cache, 1, 2, 3, 4)
    assert told(cache.take_events(), (1, 2, 3, 4)) == ["+gpu 1 2 3 4"]
    fill(cache, 1, 2, 5)
    (event,) = cache.take_events()
    assert getattr(event, "parent_block_hash", None) is not None
    assert told([event], (1, 2, 5)) == ["+gpu 5"]


def test_a_split_tells_nothing() -> None:
    """A prompt that leaves a node in its middle cuts it, in a match and in an insert, without an event."""
    cache = cache_of()
    fill(cache, 1, 2, 3, 4)
    cache.take_events()
    cache.match(key(1, 2, 9))
    assert cache.take_events() == []
    fill(cache, 1, 2, 3, 5)
    assert told(cache.take_events(), (1, 2, 3, 5)) == ["+gpu 5"]
    assert len(list(cache.tree.table())) == 4


def test_leaves_are_evicted_before_what_leads_to_them() -> None:
    """The leaf that was used longest ago goes first, whole; its parent may follow."""
    cache = cache_of(6)
    fill(cache, 1, 2, 3)
    fill(cache, 1, 2, 4)
    fill(cache, 5)
    cache.take_events()
    assert cache.evict(1) == SIZE
    assert told(cache.take_events(), (1, 2, 3)) == ["-gpu 3"]
    assert cache.evict(3 * SIZE) == 3 * SIZE
    assert told(cache.take_events(), (1, 2, 4)) == ["-gpu 4 1 2"]


def test_an_eviction_takes_whole_leaves() -> None:
    """A leaf of three pages goes where one page is wanted."""
    cache = cache_of(4)
    fill(cache, 1, 2, 3)
    assert cache.evict(SIZE) == 3 * SIZE


def test_a_match_is_a_use() -> None:
    """What was asked about last is evicted last, though it was stored first."""
    cache = cache_of(4)
    fill(cache, 1)
    fill(cache, 2)
    cache.match(key(1))
    cache.take_events()
    cache.evict(SIZE)
    assert told(cache.take_events(), (2,)) == ["-gpu 2"]


def test_what_is_locked_stays() -> None:
    """A running request's pages, and all that leads to them, cannot be evicted until it is done."""
    cache = cache_of(6)
    fill(cache, 1, 2)
    fill(cache, 1, 3)
    node = cache.match(key(1, 3)).device
    cache.lock(node)
    assert cache.available == 6 - 2
    assert cache.evict(6 * SIZE) == SIZE
    cache.unlock(node)
    assert cache.evict(6 * SIZE) == 2 * SIZE


def test_a_lock_covers_both_parts_of_a_split() -> None:
    """A node that is cut while it is locked stays locked above and below the cut."""
    cache = cache_of(4)
    fill(cache, 1, 2, 3)
    node = cache.match(key(1, 2, 3)).device
    cache.lock(node)
    cache.match(key(1, 9))
    assert cache.evict(4 * SIZE) == 0
    cache.unlock(node)
    assert cache.evict(4 * SIZE) == 3 * SIZE


def test_pages_that_are_there_already_are_free_again() -> None:
    """Two requests that computed the same: the second one's pages are duplicates."""
    cache = cache_of(8)
    cache.take(4)
    assert cache.insert(key(1, 2), owned=0, counted=0).duplicates == 0
    assert cache.insert(key(1, 2), owned=0, counted=0).duplicates == 2
    assert cache.free == 6


def test_no_more_pages_are_given_than_are_free() -> None:
    """Who takes must have made room."""
    with pytest.raises(ValueError, match="3 pages asked for, 2 are free"):
        cache_of(2).take(3)


@pytest.mark.parametrize(("version", "left"), [("0.5.16", 1), ("0.5.17", 2)])
def test_older_versions_make_room_for_all_that_is_asked_for(version: str, left: int) -> None:
    """Up to 0.5.16 the whole demand is evicted where it does not fit, from then on what is missing."""
    cache = cache_of(4, version)
    for page in (1, 2, 3):
        fill(cache, page)
    assert cache.make_room(2 * SIZE)
    assert len(list(cache.tree.table())) == left


def test_a_reset_forgets_and_tells() -> None:
    """Everything is gone with one event, and all pages are free."""
    cache = cache_of(4)
    fill(cache, 1, 2)
    cache.take_events()
    cache.reset()
    assert told(cache.take_events()) == ["cleared"]
    assert cache.free == 4
    assert cache.match(key(1)).device_pages == 0


def test_namespaces_are_apart() -> None:
    """Equal tokens under another salt or extra key are other pages; an extra key's names are equal all the same."""
    cache = cache_of()
    fill(cache, 1, 2)
    assert fill(cache, 1, 2, namespace=Namespace(salt="a")) == 0
    assert fill(cache, 1, 2, namespace=Namespace("x")) == 0
    assert fill(cache, 1, 2, namespace=Namespace("x")) == 2
    plain, salted, keyed = (event for event in cache.take_events() if hasattr(event, "token_ids"))
    assert getattr(plain, "block_hashes", None) == getattr(keyed, "block_hashes", None)
    assert getattr(plain, "block_hashes", None) != getattr(salted, "block_hashes", None)
    assert getattr(salted, "cache_salt", None) == "a"
