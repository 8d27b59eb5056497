"""The benchmark's prompts and who holds them, deterministic, with an exact answer for every question; pure.

A prefix tree: 20 system prompts with Zipf popularity, conversations of 64, 512 or 2048 blocks that hang off them, 30 %
of which fork from an earlier one at a turn boundary. A conversation is on 1, 2, 4 or 8 replicas; 30 % of those kept
only a beginning, 2 % have a hole. 15 % hold a beginning in host memory as well, 15 % the whole, and their end only
there. Engine events follow from that in an order in which an engine could have sent them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LENGTHS = (64, 512, 2048)
GPU, HOST = 1, 2
"""Bits of `Workload.residency`."""

_SYSTEM_PROMPTS = 20
_TURN_BLOCKS = 8
_CONCURRENT = 4  # requests of one replica whose events alternate
_FRESH = 1 << 40  # numbers of blocks that nobody holds

Blocks = NDArray[np.int64]
"""Block numbers, root first."""


class Holding(NamedTuple):
    """What one replica did with one conversation, in blocks from its root."""

    conversation: int
    replica: int
    kept: int
    hole: int  # one block evicted at the end; -1: none
    gpu: int  # from here on the GPU has dropped it
    host: int  # up to here host memory has it too


class Step(NamedTuple):
    """One engine event: consecutive blocks of one conversation that a tier stored or removed."""

    replica: int
    stored: bool
    tier: int  # GPU or HOST
    blocks: Blocks
    parent: int  # block number, -1 at the root
    moved: int  # blocks that the replica did not have before, in any tier, or does not have any more


class Workload(NamedTuple):
    """A tree of blocks, the replicas' holdings, and in the end who has what."""

    model: str
    blocks: int
    replicas: int
    conversations: list[Blocks]
    holdings: list[Holding]
    residency: NDArray[np.uint8]  # [block, replica]
    steps: list[Step]

    @property
    def held(self) -> int:
        """Number of (block, replica) pairs."""
        return int(np.count_nonzero(self.residency))


def build(blocks: int, replicas: int, event_blocks: int, *, model: str = "bench", seed: int = 7) -> Workload:
    """Return the workload of at least that many blocks."""
    rng = np.random.default_rng(seed)
    conversations, count = _grow_tree(blocks, rng)
    holdings = [
        Holding(number, int(replica), *_kept(len(conversation), rng))
        for number, conversation in enumerate(conversations)
        for replica in rng.choice(
            replicas, size=min(replicas, int(rng.choice((1, 2, 4, 8), p=(0.55, 0.25, 0.15, 0.05)))), replace=False
        )
    ]
    residency = np.zeros((count, replicas), dtype=np.uint8)
    steps = _interleave(
        [list(_steps_of(replica, holdings, conversations, residency, event_blocks)) for replica in range(replicas)]
    )
    return Workload(model, count, replicas, conversations, holdings, residency, steps)


def _grow_tree(blocks: int, rng: np.random.Generator) -> tuple[list[Blocks], int]:
    systems: list[Blocks] = []
    count = 0
    for length in rng.integers(16, 257, size=_SYSTEM_PROMPTS):
        systems.append(np.arange(count, count + length))
        count += int(length)
    popularity = 1 / np.arange(1, _SYSTEM_PROMPTS + 1)
    popularity /= popularity.sum()
    conversations: list[Blocks] = []
    by_system: list[list[Blocks]] = [[] for _ in systems]
    while count < blocks:
        system = int(rng.choice(_SYSTEM_PROMPTS, p=popularity))
        length = int(rng.choice(LENGTHS, p=(0.5, 0.35, 0.15)))
        base = systems[system]
        earlier = by_system[system]
        if earlier and rng.random() < 0.3:
            other = earlier[int(rng.integers(len(earlier)))]
            shortest = min(len(base), len(other) - 1)
            base = other[: max(1, int(rng.integers(shortest, len(other))) // _TURN_BLOCKS * _TURN_BLOCKS)]
        base = base[: length - _TURN_BLOCKS]
        conversation = np.concatenate([base, np.arange(count, count + length - len(base))])
        count += length - len(base)
        earlier.append(conversation)
        conversations.append(conversation)
    return conversations, count


def _kept(length: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return kept, hole, gpu and host of one holding."""
    kept = int(rng.integers(1, length + 1)) if rng.random() < 0.3 else length
    hole = int(rng.integers(1, kept - 1)) if rng.random() < 0.02 and kept > 4 else -1
    tiers = rng.random()
    if tiers < 0.15:
        return kept, hole, kept, int(rng.integers(1, kept + 1))
    if tiers < 0.3:
        return kept, hole, int(rng.integers(0, kept)), kept
    return kept, hole, kept, 0


def _steps_of(
    replica: int,
    holdings: Sequence[Holding],
    conversations: Sequence[Blocks],
    residency: NDArray[np.uint8],
    event_blocks: int,
) -> Iterator[Step]:
    """Yield one replica's events; brings its column of the residency to the end state."""
    has = np.zeros(len(residency), dtype=np.uint8)
    own = [holding for holding in holdings if holding.replica == replica]
    wave: list[list[Step]] = []
    touched: set[int] = set()
    for holding in own:
        conversation = conversations[holding.conversation][: holding.kept]
        if len(wave) == _CONCURRENT or not touched.isdisjoint(conversation.tolist()):
            yield from _interleave(wave)
            wave, touched = [], set()
        steps = [
            step
            for stored, tier, first, last in (
                (True, GPU, 0, holding.kept),
                (True, HOST, 0, holding.host),
                (False, GPU, holding.gpu, holding.kept),
            )
            for step in _change(replica, has, conversation, stored, tier, first, last, event_blocks)
        ]
        touched.update(block for step in steps for block in step.blocks.tolist())
        wave.append(steps)
    yield from _interleave(wave)
    for holding in own:
        if holding.hole >= 0:
            conversation = conversations[holding.conversation]
            for tier in (GPU, HOST):
                yield from _change(
                    replica, has, conversation, False, tier, holding.hole, holding.hole + 1, event_blocks
                )
    residency[:, replica] = has


def _change(
    replica: int,
    has: NDArray[np.uint8],
    conversation: Blocks,
    stored: bool,
    tier: int,
    first: int,
    last: int,
    event_blocks: int,
) -> Iterator[Step]:
    """Store or remove those of the blocks [first, last) that are not yet so, a few at a time."""
    positions = first + np.flatnonzero(((has[conversation[first:last]] & tier) != 0) != stored)
    for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
        for at in range(0, len(run), event_blocks):
            start, end = int(run[at]), int(run[min(at + event_blocks, len(run)) - 1]) + 1
            blocks = conversation[start:end]
            before = has[blocks]
            has[blocks] = before | tier if stored else before & ~np.uint8(tier)
            moved = int(np.count_nonzero((before == 0) != (has[blocks] == 0)))
            yield Step(replica, stored, tier, blocks, int(conversation[start - 1]) if start else -1, moved)


def _interleave(queues: Sequence[Sequence[Step]]) -> list[Step]:
    """Return the steps of all queues, one of each in turn."""
    return [
        queue[position]
        for position in range(max(map(len, queues), default=0))
        for queue in queues
        if position < len(queue)
    ]


class Query(NamedTuple):
    """A prompt and how far each replica has it: blocks from the root, in all and of those on the GPU."""

    blocks: Blocks
    reach: NDArray[np.int64]  # [replica]
    gpu: NDArray[np.int64]


def queries(workload: Workload, length: int, count: int, seed: int) -> list[Query]:
    """Return prompts and how far they are held."""
    return [Query(blocks, *reach(workload, blocks)) for blocks in prompts(workload, length, count, seed)]


def prompts(workload: Workload, length: int, count: int, seed: int) -> Iterator[Blocks]:
    """Yield prompts: half of them known to the end, 30 % up to somewhere, 20 % share a system prompt at most."""
    rng = np.random.default_rng([seed, length])
    long_enough = [blocks for blocks in workload.conversations if len(blocks) >= length]
    fresh = _FRESH
    for _ in range(count):
        blocks = long_enough[int(rng.integers(len(long_enough)))][:length].copy()
        kind = rng.random()
        if kind >= 0.5:
            cut = int(rng.integers(1, length)) if kind < 0.8 else min(int(rng.integers(16, 257)), length - 1)
            blocks[cut:] = np.arange(fresh, fresh + length - cut)
            fresh += length
        yield blocks


def reach(workload: Workload, blocks: Blocks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each replica how many blocks it has unbroken from the root, and how many of those on the GPU."""
    known = workload.residency[blocks[: int(np.count_nonzero(blocks < workload.blocks))]]
    unbroken = np.logical_and.accumulate(known != 0, axis=0)
    return unbroken.sum(axis=0), (unbroken & ((known & GPU) != 0)).sum(axis=0)
