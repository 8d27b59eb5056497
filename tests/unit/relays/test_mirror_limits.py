"""The mirror is bounded, and churn leaves nothing behind (DESIGN 4.16, case B14). Blocks have four tokens."""

import time
import tracemalloc

import pytest

from relays.cache.block_table import Limits
from relays.engine_events import Stored
from relays.mirror import Mirror
from tests.support.engines import chain, drain, profile, removed, resident, stored, tokens

A, B = chain(tokens(2))
ROOT = stored([1], tokens(1))


def branch(cycle: int) -> Stored:
    """Return three blocks below the shared root that no other cycle has."""
    return stored([10 + 3 * cycle + n for n in range(3)], tokens(3, first=100 + 12 * cycle), parent=1)


def churn(mirror: Mirror, first: int, last: int) -> None:
    """Store three blocks a cycle and remove them, last block first and first block first in turn."""
    for cycle in range(first, last):
        event = branch(cycle)
        mirror.apply([event])
        names = event.hashes if cycle % 2 else event.hashes[::-1]
        for name in names:
            mirror.apply([removed(name)])
        if cycle % 7 == 0:
            drain(mirror)


def left_over(mirror: Mirror) -> tuple[int, int, int, int]:
    return mirror.nodes, mirror.blocks, mirror.pending_blocks, mirror.ambiguous_blocks


def test_churn_under_a_shared_prefix_leaves_the_prefix_alone() -> None:
    """After thousands of branches came and went exactly the shared block is known."""
    mirror = Mirror(profile())
    mirror.apply([ROOT])
    churn(mirror, 0, 2_000)
    drain(mirror)
    assert left_over(mirror) == (1, 1, 0, 0)
    assert resident(mirror) == {A: 1}


def test_branches_that_split_leave_the_prefix_alone() -> None:
    """Chains s-x1-x2-x3 and s-x1-y2, removed as x1, y2, x3, x2, end with s alone, drained or not (case B14)."""
    mirror = Mirror(profile())
    mirror.apply([ROOT])
    for cycle in range(500):
        x = branch(cycle)
        mirror.apply([x, stored([5], tokens(1, first=9_000_000), parent=x.hashes[0])])
        if cycle % 2:
            drain(mirror)
        for name in (x.hashes[0], 5, x.hashes[2], x.hashes[1]):
            mirror.apply([removed(name)])
    drain(mirror)
    assert left_over(mirror) == (1, 1, 0, 0)


@pytest.mark.slow
def test_memory_is_flat_over_a_long_churn() -> None:
    """What 30,000 cycles leave allocated is within a tenth of what 3,000 cycles left."""
    mirror = Mirror(profile())
    mirror.apply([ROOT])
    tracemalloc.start()
    try:
        churn(mirror, 0, 3_000)
        early = tracemalloc.get_traced_memory()[0]
        churn(mirror, 3_000, 30_000)
        late = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert late < early * 1.1 + 100_000


def test_engine_hashes_are_bounded() -> None:
    """Past the bound a new hash is refused and counted; the known ones go on."""
    mirror = Mirror(profile(), limits=Limits(blocks=2))
    mirror.apply([stored([1, 2, 3], tokens(3))])
    assert resident(mirror) == {A: 1, B: 1}
    assert mirror.counts["limit_blocks"] == 1
    mirror.apply([removed(3), removed(2), stored([2], tokens(1, first=5), parent=1)])
    assert resident(mirror) == {A: 1, B: 1}
    assert (mirror.nodes, mirror.blocks) == (2, 2)


def test_a_wait_is_bounded_in_tokens_too() -> None:
    """Stores of one hash and very many tokens do not wait in unbounded numbers."""
    mirror = Mirror(profile(), limits=Limits(pending_blocks=100))
    tracemalloc.start()
    try:
        for n in range(100):
            mirror.apply([stored([10 + n], list(range(1_000_000 + n, 1_004_000 + n)), parent=1)])
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 2_000_000


def test_a_batch_costs_no_more_while_nobody_drains() -> None:
    """With Kafka away the mirror goes on at its pace: the two-thousandth batch costs about what the first ones did."""
    mirror = Mirror(profile())
    events = [stored(range(5 * n + 1, 5 * n + 6), tokens(5, first=20 * n + 1)) for n in range(2_000)]

    def cost_s(first: int) -> float:
        started_s = time.process_time()
        for event in events[first : first + 200]:
            mirror.apply([event])
        return time.process_time() - started_s

    early_s = min(cost_s(0), cost_s(200))
    for event in events[400:1_600]:
        mirror.apply([event])
    assert min(cost_s(1_600), cost_s(1_800)) < 4 * early_s


def test_a_drain_takes_about_as_much_as_it_is_asked_for() -> None:
    """A drain stops at its bound and leaves the rest for the next one."""
    mirror = Mirror(profile())
    mirror.apply([stored(range(1, 101), tokens(100))])
    first = mirror.take_runs(30)
    assert sum(len(run.nodes) for run in first) == 30
    assert mirror.changed
    rest = mirror.take_runs(1_000)
    assert {node.hash for run in [*first, *rest] for node in run.nodes} == set(chain(tokens(100)))
    assert not mirror.changed


def test_runs_go_down_one_chain_with_one_residency() -> None:
    """Blocks that follow each other and changed alike are one run; another residency or a branch starts another."""
    mirror = Mirror(profile())
    mirror.apply([stored([1, 2, 3, 4], tokens(4)), stored([3], tokens(1, first=9), parent=2, tier="host")])
    mirror.apply([stored([9], tokens(1, first=90), parent=3)])
    shapes = [(run.head.depth, len(run.nodes), run.residency) for run in mirror.take_runs(100)]
    assert sorted(shapes) == [(0, 2, 1), (2, 1, 3), (3, 1, 1), (3, 1, 1)]
