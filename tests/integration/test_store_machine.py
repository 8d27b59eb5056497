"""A state machine that holds the memory store and Redis equal, whatever a topic brings and in whatever process."""

import asyncio
import itertools
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import redis.asyncio as aioredis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from index.fold import Cursor, Flush, HolderWrite
from index.memory_store import MemoryStore
from index.redis_store import RedisStore
from index.rules import ANY_GAP
from index.store import HolderRow, Store
from schemas.errors import StaleIndex
from schemas.events import Heartbeat
from schemas.profiles import Holder
from tests.support.engines import profile
from tests.support.writes import part, runs, write

T = TypeVar("T")
HOLDERS = [Holder("r", 0), Holder("r", 1), Holder("node7", None)]
Span = tuple[int, int]


class StoreMachine(RuleBasedStateMachine):
    """Tells both stores the same, and asks both the same."""

    url = ""
    shards = 1
    chains = Bundle("chains")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = f"machine-{uuid.uuid4().hex[:12]}"
        self.memory = MemoryStore()
        self.redis = RedisStore.from_urls([self.url], self.shards)
        self.position = dict.fromkeys(HOLDERS, (1, 0))  # life, last sequence
        self.flushes: list[Flush] = []
        self.names = itertools.count(1)
        for store in self.both:
            self.run(store.setup(self.model))

    @property
    def both(self) -> tuple[Store, Store]:
        """Return the reference and the one that is compared with it."""
        return self.memory, self.redis

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns."""
        return self.runner.run(work)

    def teardown(self) -> None:
        """Close what was opened."""
        self.run(self.redis.close())
        self.runner.close()

    # ---- prompts

    @initialize(target=chains, length=st.integers(1, 300))
    def first_chain(self, length: int) -> list[int]:
        return [next(self.names) << 20 for _ in range(length)]

    @rule(target=chains, base=chains, cut=st.integers(0, 300), length=st.sampled_from([1, 2, 5, 40, 130, 300]))
    def branch(self, base: list[int], cut: int, length: int) -> list[int]:
        return base[:cut] + [next(self.names) << 20 for _ in range(length)]

    # ---- what a topic brings

    @rule(
        chain=chains,
        holder=st.sampled_from(HOLDERS),
        at=st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 3, 40, 130, 600])),
        residency=st.sampled_from([0, 0, 1, 1, 2, 3, 0x8001]),
        again=st.none() | st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 100])),
        lost=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 1]),
    )
    def change(self, chain: list[int], holder: Holder, at: Span, residency: int, again: Span | None, lost: int) -> None:
        """Store, move or remove a stretch, and perhaps a second one in the same record; perhaps a record was lost."""
        spans = [(at, residency)] + ([(again, 0)] if again else [])
        stretches = [
            part(chain, min(first, len(chain)), min(first + count, len(chain)), value)
            for (first, count), value in spans
        ]
        first = self.next_sequence(holder, lost)
        self.flush(write(*stretches, holder=holder, life=self.position[holder][0], sequence=first, told={"0": first}))

    @rule(chain=chains, holder=st.sampled_from(HOLDERS), clears=st.booleans(), tells=st.booleans())
    def begin(self, chain: list[int], holder: Holder, clears: bool, tells: bool) -> None:
        """Begin an epoch of the life, or a new life, and store a chain in it."""
        if not clears:
            self.position[holder] = (self.position[holder][0] + 1, 0)
        sequence = self.next_sequence(holder)
        known = profile(unit=self.position[holder][0]) if tells or not clears else None
        life = self.position[holder][0]
        epoch = sequence if clears else -1
        self.flush(write(part(chain), holder=holder, life=life, sequence=sequence, epoch=epoch, profile=known))

    @rule(
        holder=st.sampled_from(HOLDERS),
        ahead=st.sampled_from([0, 0, 0, 1]),
        lives=st.sampled_from([0, 0, 0, 0, 1, -1]),
        stale=st.booleans(),
    )
    def beat(self, holder: Holder, ahead: int, lives: int, stale: bool) -> None:
        """Hear a heartbeat, which may know of a record or of a life that did not come, or be of a life before."""
        life, sequence = self.position[holder]
        if lives:
            life, sequence = max(1, life + lives), 0
        if lives > 0:
            self.position[holder] = (life, ahead)
        beat = Heartbeat("stale" if stale else "live", {"0": sequence}, 0.5, "why")
        last = sequence + ahead
        self.flush(write(sequence=last + 1, last=last, holder=holder, life=life, beat=beat))

    @precondition(lambda self: self.flushes)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        """Deliver an old flush again: a redelivery, or a record of a life that is over."""
        self.apply(data.draw(st.sampled_from(self.flushes[-6:])))

    @rule()
    def change_process(self) -> None:
        """Go on in a process that remembers nothing."""
        self.run(self.redis.close())
        self.redis = RedisStore.from_urls([self.url], self.shards)
        assert self.run(self.redis.setup(self.model)) is False

    @precondition(lambda self: len(self.flushes) > 8)
    @rule(expected=st.sets(st.sampled_from(HOLDERS)), shard=st.none() | st.integers(0, 2))
    def lose_everything(self, expected: set[Holder], shard: int | None) -> None:
        """Begin with nothing but whom to expect, after all was lost, or the data of one server."""
        bases = self.redis._bases(self.model)
        for base in bases if shard is None else [bases[shard % len(bases)]]:
            self.run(lose(self.url, base))
        with pytest.raises(StaleIndex):
            self.run(self.redis.apply(Flush(self.model, None, [])))
        self.memory = MemoryStore()
        profiles = {holder: profile() for holder in expected}
        for store in self.both:
            assert self.run(store.setup(self.model, profiles)) is True

    @rule()
    def sweep(self) -> None:
        """Forget what dead slots left; no answer changes."""
        self.run(self.redis.sweep(self.model))

    def next_sequence(self, holder: Holder, lost: int = 0) -> int:
        """Return the sequence of a holder's next record."""
        life, sequence = self.position[holder]
        self.position[holder] = (life, sequence + 1 + lost)
        return sequence + 1 + lost

    def flush(self, *writes: HolderWrite) -> None:
        """Tell both stores something new."""
        flush = Flush(self.model, Cursor("topic", 0, len(self.flushes) + 1), list(writes))
        self.flushes.append(flush)
        self.apply(flush)

    def apply(self, flush: Flush) -> None:
        """Apply a flush on both; they must say the same of it."""
        reference, compared = (self.run(store.apply(flush)) for store in self.both)
        assert compared == reference

    # ---- what is asked

    @rule(chain=chains, cut=st.integers(0, 700), strange=st.integers(0, 5), gap=st.sampled_from([0, 0, 1, 3, ANY_GAP]))
    def find(self, chain: list[int], cut: int, strange: int, gap: int) -> None:
        """Ask for a prompt that may leave the chain: all of memory's answer, and nothing that is not so."""
        prompt = chain[:cut] + [next(self.names) << 20 for _ in range(strange)]
        least = blocks_of(self.run(runs(self.memory, self.model, prompt, gap)))
        most = blocks_of(self.run(runs(self.memory, self.model, prompt, ANY_GAP)))
        found = self.run(runs(self.redis, self.model, prompt, gap))
        told = blocks_of(found)
        assert least.items() <= told.items() <= most.items()
        for held in found.values():  # in order, and no longer than they must be
            assert all(
                a[0] + a[1] < b[0] or (a[0] + a[1] == b[0] and a[2] != b[2]) for a, b in itertools.pairwise(held)
            )

    @rule()
    def compare_digests(self) -> None:
        """Compare each holder's digest."""
        for holder in HOLDERS:
            reference, compared = (self.run(store.digest(self.model, holder)) for store in self.both)
            assert compared == reference

    @invariant()
    def rows_are_equal(self) -> None:
        """Compare what is known of the holders, and the cursor."""
        reference, compared = ({row.holder: facts(row) for row in self.run(s.holders(self.model))} for s in self.both)
        assert compared == reference
        assert self.run(self.redis.cursors(self.model)) == self.run(self.memory.cursors(self.model))


async def lose(url: str, base: str) -> None:
    """Delete a shard's keys: a server that was flushed has none."""
    async with aioredis.Redis.from_url(url) as client:
        keys = [key async for key in client.scan_iter(f"{base}*", count=5000)]
        await client.delete(*keys)


def blocks_of(found: dict[str, list[tuple[int, int, int]]]) -> dict[tuple[str, int], int]:
    """Return (holder, block) -> residency."""
    return {
        (holder, block): residency
        for holder, held in found.items()
        for start, length, residency in held
        for block in range(start, start + length)
    }


def facts(row: HolderRow) -> tuple[object, ...]:
    """Return all that a row says but its age, which is the clock's."""
    heard = (row.state, row.reason, row.share_known, row.received, row.age_s is not None)
    return (row.life, row.epoch, row.sequence, row.broken, row.applied, row.profile, *heard)


@pytest.mark.parametrize("shards", [1, 3])
def test_redis_agrees_with_memory(redis_url: str, shards: int) -> None:
    """After any stores, moves, removals, clears, lives, gaps, repeats and sweeps both stores answer alike."""
    machine = type("Machine", (StoreMachine,), {"url": redis_url, "shards": shards})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
