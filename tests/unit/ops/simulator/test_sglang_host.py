"""The simulated HiCache tier: write-through, write-back, loads, and what it evicts."""

import pytest

from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.events import HOST
from ops.simulator.sglang.pages import key_of
from tests.support.sglang_cache import SIZE, cache_of, fill, key, told

PLAIN = key(1).namespace


def through(pages: int = 4, host_pages: int = 20) -> Cache:
    return cache_of(pages, host_pages=host_pages)


def back(pages: int = 4, host_pages: int = 20, version: str = "0.5.23") -> Cache:
    return cache_of(pages, version, host_pages=host_pages, write_policy="write_back")


def test_a_computed_page_is_backed_up_and_told_a_step_later() -> None:
    """Write-through: the device's copy is told at once, the host's when the transfer ended; it cannot go before."""
    cache = through()
    cache.take(2)
    cache.insert(key(1, 2), owned=0, counted=0)
    assert told(cache.take_events(), (1, 2)) == ["+gpu 1 2"]
    assert cache.unsettled
    assert cache.evict(SIZE) == 0
    cache.settle()
    assert told(cache.take_events(), (1, 2)) == ["+host 1 2"]
    assert not cache.unsettled
    assert cache.evict(SIZE) == 2 * SIZE


def test_a_device_eviction_leaves_the_host_copy() -> None:
    """The page is still reused, from the host; loading it back leaves both copies."""
    cache = through()
    fill(cache, 1, 2)
    cache.take_events()
    cache.evict(2 * SIZE)
    assert told(cache.take_events(), (1, 2)) == ["-gpu 1 2"]
    match = cache.match(key(1, 2, 3))
    assert (match.device_pages, match.host_pages) == (0, 2)
    assert fill(cache, 1, 2) == 2
    assert told(cache.take_events(), (1, 2)) == ["+gpu 1 2"]
    assert cache.table(HOST) == cache.table("GPU")


def test_a_part_that_was_evicted_is_loaded_behind_what_is_there() -> None:
    """Only the device's leaves go, so the host's part stands behind the device's."""
    cache = through(6)
    fill(cache, 1, 2)
    fill(cache, 1, 2, 3)
    cache.evict(SIZE)
    match = cache.match(key(1, 2, 3))
    assert (match.device_pages, match.host_pages) == (2, 1)


def test_a_host_eviction_takes_what_the_device_no_longer_has() -> None:
    """The host makes room with leaves that are there alone, used longest ago first; then they are gone."""
    cache = through(3, host_pages=4)
    fill(cache, 1, 2)
    fill(cache, 3, 4)
    cache.take_events()
    fill(cache, 5)
    assert told(cache.take_events(), (1, 2), (5,)) == ["+gpu 5", "-host 1 2", "+host 5"]
    assert cache.match(key(1, 2)).host_pages == 0
    assert cache.match(key(3, 4)).device_pages == 2


def test_a_full_host_leaves_a_page_without_a_copy() -> None:
    """Where nothing can be evicted there, write-through goes without; the device's eviction then ends the page."""
    cache = through(4, host_pages=1)
    fill(cache, 1, 2)
    assert told(cache.take_events(), (1, 2)) == ["+gpu 1 2"]
    cache.evict(2 * SIZE)
    assert told(cache.take_events(), (1, 2)) == ["-gpu 1 2"]
    assert cache.match(key(1, 2)).host_pages == 0


def test_selective_write_through_waits_for_a_second_use() -> None:
    """A prompt that is stored again is backed up, with all that leads to it."""
    cache = cache_of(6, host_pages=20, write_policy="write_through_selective")
    fill(cache, 1, 2)
    assert told(cache.take_events(), (1, 2)) == ["+gpu 1 2"]
    fill(cache, 1, 2, 3)
    assert told(cache.take_events(), (1, 2, 3)) == ["+gpu 3", "+host 1 2"]


def test_write_back_copies_what_is_evicted() -> None:
    """The host's store is told before the device's removal, in the same step."""
    cache = back()
    fill(cache, 1, 2)
    assert told(cache.take_events(), (1, 2)) == ["+gpu 1 2"]
    cache.evict(SIZE)
    assert told(cache.take_events(), (1, 2)) == ["+host 1 2", "-gpu 1 2"]
    assert fill(cache, 1, 2) == 2
    cache.take_events()
    cache.evict(SIZE)
    assert told(cache.take_events(), (1, 2)) == ["-gpu 1 2"], "the host had it still"


def test_hiradix_tells_a_write_back_after_the_removal() -> None:
    """Up to 0.5.18 the removals of an eviction are told first, and then what it wrote."""
    cache = back(version="0.5.18")
    fill(cache, 1)
    fill(cache, 2)
    cache.take_events()
    cache.evict(2 * SIZE)
    assert told(cache.take_events(), (1,), (2,)) == ["-gpu 1 2", "+host 1", "+host 2"]


def test_write_back_gives_up_copies_of_what_the_device_has() -> None:
    """A host that is full reclaims duplicates first; the device's copy stays, and nothing else is lost."""
    cache = back(5, host_pages=3)
    fill(cache, 1, 2)
    cache.evict(2 * SIZE)
    fill(cache, 1, 2)  # loaded back: both tiers have it
    fill(cache, 3, 4)
    cache.match(key(1, 2))
    cache.take_events()
    cache.evict(SIZE)
    assert told(cache.take_events(), (1, 2), (3, 4)) == ["-host 1 2", "+host 3 4", "-gpu 3 4"]
    assert cache.match(key(1, 2)).device_pages == 2


def test_write_back_without_room_drops_what_hangs_below() -> None:
    """A leaf that the host cannot take ends, and so do the host copies behind it."""
    cache = back(6, host_pages=2)
    fill(cache, 1, 2, 3)
    fill(cache, 1, 2, 3, 4, 5)
    cache.evict(2 * SIZE)
    cache.take_events()
    cache.evict(3 * SIZE)
    assert told(cache.take_events(), (1, 2, 3, 4, 5)) == ["-host 4 5", "-gpu 1 2 3"]
    assert not list(cache.tree.table())


def test_a_short_run_is_computed_again() -> None:
    """Fewer than ten tokens are not loaded back; their host copies stay where they are."""
    cache = Cache(dialect_of("0.5.23"), 4, 10, host_pages=20)
    tokens = list(range(12))
    for end in (4, 12):
        cache.take(end // 4 - cache.match(key_of(tokens[:end], PLAIN, 4, pairs=False)).device_pages)
        cache.insert(key_of(tokens[:end], PLAIN, 4, pairs=False), owned=end // 12, counted=0)
        cache.settle()
    cache.evict(8)
    match = cache.match(key_of(tokens, PLAIN, 4, pairs=False))
    assert (match.device_pages, match.host_pages) == (1, 2)
    assert cache.load_back(match) == 0
    cache.evict(4)
    assert cache.load_back(cache.match(key_of(tokens, PLAIN, 4, pairs=False))) == 3


def test_a_load_without_room_is_not_made() -> None:
    """Where the device is held by requests the prompt is computed, and its host copies stay."""
    cache = through(3)
    fill(cache, 1, 2)
    cache.evict(2 * SIZE)
    cache.take(2)
    assert cache.load_back(cache.match(key(1, 2))) == 0
    assert cache.match(key(1, 2)).host_pages == 2


def test_a_page_computed_again_takes_its_place_on_the_device() -> None:
    """A request that did not load back stores over the host's copy: the device has it again, and that is told."""
    cache = through()
    fill(cache, 1, 2)
    cache.evict(2 * SIZE)
    cache.take_events()
    cache.take(2)
    assert cache.insert(key(1, 2), owned=0, counted=0).duplicates == 0
    assert told(cache.take_events(), (1, 2)) == ["+gpu 1 2"]
    assert cache.table(HOST) == cache.table("GPU")


def test_a_backup_that_is_cut_meanwhile_is_told_in_both_parts() -> None:
    """A split during the transfer changes nothing of what is told when it ends."""
    cache = through(6)
    cache.take(3)
    cache.insert(key(1, 2, 3), owned=0, counted=0)
    cache.match(key(1, 9))
    cache.take_events()
    cache.settle()
    assert told(cache.take_events(), (1, 2, 3)) == ["+host 1 2 3"]
    assert cache.evict(3 * SIZE) == 3 * SIZE, "both parts are let go of"


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_up_to_0_5_10_the_host_tier_is_silent(policy: str) -> None:
    """Neither backup nor demotion nor load is told; that a page leaves the host is told as the device's removal."""
    cache = cache_of(2, "0.5.10", host_pages=2, write_policy=policy)
    fill(cache, 1, 2)
    cache.evict(2 * SIZE)
    fill(cache, 1, 2)
    assert told(cache.take_events(), (1,), (1, 2)) == ["+gpu 1", "+gpu 2"]
    cache.evict(2 * SIZE)
    assert cache.host is not None
    assert cache.host.evict(2) == 2
    assert told(cache.take_events(), (1,), (1, 2)) == ["-gpu 1", "-gpu 2"]


def test_a_flush_empties_both_tiers() -> None:
    """One event, and the host's pages are free again."""
    cache = through()
    fill(cache, 1, 2)
    cache.take_events()
    cache.reset()
    assert told(cache.take_events()) == ["cleared"]
    assert cache.host is not None
    assert cache.host.free == 20
