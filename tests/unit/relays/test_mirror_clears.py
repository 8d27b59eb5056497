"""A clear has a scope (DESIGN 4.11). Blocks have four tokens."""

import time
from typing import Any

from relays.engine_events import Cleared, EngineEvent
from relays.mirror import Mirror
from schemas.profiles import Group, Profile
from tests.support.engines import chain, drain, profile, removed, resident, stored, tiers, tokens

A, B, C, D = chain(tokens(4))


def host(*names: int, **fields: Any) -> EngineEvent:
    """Return a store on the host that names hashes only, as OffloadingConnector sends it."""
    return stored(names, [], tier="host", block_size=0, **fields)


def offloading(capacity: int | None = None, *groups: Group) -> Profile:
    return profile(*groups, tiers=tiers("gpu", "host", capacity=capacity), hash_only_stores=True, clear_scope="device")


def test_a_device_clear_leaves_the_host() -> None:
    """With scope `device` a block that is on the host too stays there, and the index hears of each change."""
    mirror = Mirror(offloading())
    mirror.apply([stored([1, 2], tokens(2)), host(1)])
    drain(mirror)
    mirror.apply([Cleared()])
    assert resident(mirror) == {A: 2}
    assert not mirror.take_cleared()
    assert drain(mirror) == {A: 2, B: 0}


def test_a_clear_that_leaves_nothing_is_told_as_one() -> None:
    """When no copy is left the index hears one clear, not a removal a block."""
    mirror = Mirror(profile(clear_scope="device"))
    mirror.apply([stored([1, 2], tokens(2))])
    drain(mirror)
    mirror.apply([Cleared()])
    assert (mirror.nodes, mirror.blocks) == (0, 0)
    assert mirror.take_cleared()
    assert drain(mirror) == {}
    assert not mirror.changed


def test_a_clear_of_what_was_never_told_is_not_told() -> None:
    """Blocks that came and were cleared between two drains are no news."""
    mirror = Mirror(profile(clear_scope="all"))
    mirror.apply([stored([1], tokens(1)), Cleared()])
    assert not mirror.changed


def test_stores_behind_a_clear_in_one_batch_stay() -> None:
    """A batch that clears and then stores leaves what it stored."""
    mirror = Mirror(profile(clear_scope="device"))
    mirror.apply([stored([1, 2], tokens(2))])
    drain(mirror)
    mirror.apply([Cleared(), stored([1], tokens(1))])
    assert mirror.take_cleared()
    assert drain(mirror) == resident(mirror) == {A: 1}


def test_a_clear_resets_the_counts() -> None:
    """Two copies before a clear and one after it are ended by one removal (case B03)."""
    mirror = Mirror(profile(clear_scope="device"))
    mirror.apply([stored([1], tokens(1)), stored([1], tokens(1)), Cleared(), stored([1], tokens(1))])
    mirror.apply([removed(1)])
    assert resident(mirror) == {}


def test_where_no_property_is_known_a_clear_ends_all_tiers() -> None:
    """With scope `all` host copies go too."""
    mirror = Mirror(profile(clear_scope="all", hash_only_stores=True))
    mirror.apply([stored([1], tokens(1)), host(1)])
    mirror.apply([Cleared()])
    assert resident(mirror) == {}


def test_the_second_clear_of_a_batch_is_the_hosts() -> None:
    """With scope `device_then_host` device blocks stored between two clears survive (vLLM offload-simple, 162)."""
    mirror = Mirror(profile(clear_scope="device_then_host", hash_only_stores=True))
    mirror.apply([stored([1, 2], tokens(2)), host(1, 2)])
    mirror.apply([Cleared(), stored([1], tokens(1)), Cleared()])
    assert resident(mirror) == {A: 1}


def test_the_first_clear_of_the_next_batch_is_the_devices_again() -> None:
    """Clears are counted within a batch: one a batch never touches the host."""
    mirror = Mirror(profile(clear_scope="device_then_host", hash_only_stores=True))
    mirror.apply([stored([1], tokens(1)), host(1)])
    mirror.apply([Cleared()])
    mirror.apply([Cleared()])
    assert resident(mirror) == {A: 2}


def test_an_event_that_names_its_tier_clears_that_tier() -> None:
    """A clear with a tier overrules the profile's scope."""
    mirror = Mirror(profile(clear_scope="all", hash_only_stores=True))
    mirror.apply([stored([1], tokens(1)), host(1)])
    mirror.apply([Cleared(tier="host")])
    assert resident(mirror) == {A: 1}


def test_a_host_count_above_its_capacity_proves_a_silent_clear() -> None:
    """Host copies older than the last device clear are retracted once more copies are told than fit."""
    mirror = Mirror(offloading(capacity=2))
    mirror.apply([stored([1, 2], tokens(2)), host(1, 2)])
    mirror.apply([Cleared(), stored([1, 2, 3, 4], tokens(4)), host(3)])
    assert resident(mirror) == {A: 1, B: 1, C: 3, D: 1}
    assert mirror.counts["silent_clear_proved"] == 1


def test_a_host_within_its_capacity_is_believed() -> None:
    """As long as the copies fit, a device clear says nothing against them."""
    mirror = Mirror(offloading(capacity=3))
    mirror.apply([stored([1, 2], tokens(2)), host(1, 2)])
    mirror.apply([Cleared(), stored([1, 2, 3], tokens(3)), host(3)])
    assert resident(mirror) == {A: 3, B: 3, C: 3}
    assert mirror.counts["silent_clear_proved"] == 0


def test_a_copy_told_again_after_the_clear_is_young() -> None:
    """A host copy that is announced after the clear survives its proof."""
    mirror = Mirror(offloading(capacity=2))
    mirror.apply([stored([1, 2], tokens(2)), host(1, 2)])
    mirror.apply([Cleared(), stored([1, 2, 3], tokens(3)), host(2), host(3)])
    assert resident(mirror) == {A: 1, B: 3, C: 3}


def test_too_many_copies_without_a_clear_prove_nothing() -> None:
    """A capacity that was configured too small is counted, and retracts nothing."""
    mirror = Mirror(offloading(capacity=1))
    mirror.apply([stored([1, 2], tokens(2)), host(1, 2)])
    assert resident(mirror) == {A: 3, B: 3}
    assert mirror.counts["capacity_exceeded"] == 1


def test_a_removal_makes_room() -> None:
    """Evicted host copies do not count against the capacity."""
    mirror = Mirror(offloading(capacity=2))
    mirror.apply([stored([1, 2, 3], tokens(3)), host(1, 2)])
    mirror.apply([Cleared(), stored([1, 2, 3], tokens(3)), removed(1, tier="host"), host(3)])
    assert resident(mirror) == {A: 1, B: 3, C: 3}


def test_the_proof_retracts_every_groups_copy() -> None:
    """A block that lost one group's host copy still loses the other group's when the clear is proved."""
    groups = (Group(0, "full", 4), Group(1, "window", 4, 8))
    mirror = Mirror(offloading(1, *groups))
    mirror.apply([stored([1, 2], tokens(2)), stored([1, 2], tokens(2), group=1)])
    mirror.apply([host(1), host(1, group=1)])
    mirror.apply([removed(1, tier="host")])
    mirror.apply([Cleared(), host(2), host(2, group=1), host(3)])
    assert set(mirror.engine_table("host")) == {(0, 2), (1, 2), (0, 3)}


def test_a_flood_of_clears_costs_no_more_than_one() -> None:
    """Two thousand clears in a batch do not look through all of the host's blocks two thousand times."""
    mirror = Mirror(offloading())
    names = range(1, 10_001)
    mirror.apply([stored(names, tokens(10_000)), host(*names)])
    started_s = time.process_time()
    mirror.apply([Cleared()] * 2_000)
    cost_s = time.process_time() - started_s
    assert cost_s < 1.0
    assert mirror.blocks == 10_000
