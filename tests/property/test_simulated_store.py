"""Simulated vLLMs that share a simulated Mooncake store: each request reuses what the index says, to the token.

What the engines and the master publish goes as bytes through the relays' own cores into an index; before each request
it is asked, and the engine's own count is compared with the answer.
"""

import random
from collections.abc import Sequence

import pytest

from ops.simulator.api import completion_of
from ops.simulator.block_pool import BlockPool
from ops.simulator.chain import DEFAULT_SEED, HashScheme, root_of
from ops.simulator.connector import Connector
from ops.simulator.dialect import dialect_of
from ops.simulator.engine import Engine, Limits, Request
from ops.simulator.mooncake.master import Master
from ops.simulator.mooncake.wire import encode_batches, object_key
from ops.simulator.wire import encode_batch
from relays.dialects import EngineSettings, PoolSettings, vllm_profile
from relays.engine import EngineRank
from schemas.profiles import Holder, PoolUse
from tests.support.pool_world import POOL, PoolWorld, plain

VERSION = "0.32.0"
SIZE = 8
LEASE_S = 5.0
MOST_STEPS = 5_000


class SharedStore:
    """A master without sockets, and what it publishes."""

    def __init__(self, objects: int) -> None:
        self.now_s = 0.0
        self.master = Master(objects, LEASE_S, 0.95, 0.2)
        self.sequence = 0

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks are there in a row."""
        found = self.master.exist([object_key("m", name) for name in hashes], self.now_s)
        return found.index(False) if False in found else len(found)

    def save(self, hashes: Sequence[bytes]) -> None:
        """Put blocks."""
        self.master.put([object_key("m", name) for name in hashes], self.now_s)

    def messages(self) -> list[list[bytes]]:
        """Return what is published now."""
        self.master.evict(self.now_s)
        frames = []
        for payload in encode_batches(self.master.take_changes(), "store", 1, 1700000000000):
            self.sequence += 1
            frames.append([b"", self.sequence.to_bytes(8, "big"), payload])
        return frames


class Replica:
    """A simulated vLLM, and its relay."""

    def __init__(self, name: str, store: SharedStore, blocks: int, batched: int) -> None:
        dialect = dialect_of(VERSION)
        self.pool = BlockPool(blocks, SIZE, unhashed_first=dialect.unhashed_first)
        scheme = HashScheme(root_of(DEFAULT_SEED), SIZE, dialect.tagged_keys)
        self.engine = Engine(self.pool, scheme, dialect, Limits(4, batched, 1000), Connector(store, SIZE))
        profile = vllm_profile("m", name, VERSION, EngineSettings(block_size=SIZE, pools=(PoolUse(POOL),)))
        self.rank = EngineRank(profile, Holder(name, 0), 1)
        self.sequence = 0

    def step(self) -> dict[str, int]:
        """Make one step; return what the requests that it ended had reused."""
        outcome = self.engine.step()
        if outcome.events:
            payload = encode_batch(1.0, outcome.events, 0, dialect_of(VERSION))
            decoded = self.rank.take(self.sequence, payload)
            assert decoded is not None
            assert not decoded.rejects
            self.sequence += 1
        return {finished.request.id: finished.cached_tokens for finished in outcome.finished}


class Fleet:
    """Two replicas, their store, the relays and the index."""

    def __init__(self, objects: int, blocks: int, batched: int) -> None:
        self.store = SharedStore(objects)
        self.replicas = [Replica(name, self.store, blocks, batched) for name in ("a", "b")]
        self.world = PoolWorld("mooncake", PoolSettings(block_size=SIZE))
        self.world.catch_up()
        for number, replica in enumerate(self.replicas):  # the index knows of a replica that has said something
            replica.engine.submit(Request("first", [number] * SIZE, [1]))
            self.run(replica)

    def tell(self) -> None:
        """Bring all that was published to the index."""
        for replica in self.replicas:
            self.world.tell(replica.rank)
        self.world.read()
        for message in self.store.messages():
            self.world.hear(message)
        self.world.beat()

    def run(self, replica: Replica) -> dict[str, int]:
        """Let a replica come to rest; return what its requests had reused."""
        reused: dict[str, int] = {}
        for _ in range(MOST_STEPS):
            if not replica.engine.busy:
                break
            reused |= replica.step()
            self.store.now_s += 0.1
        assert not replica.engine.busy
        self.tell()
        return reused


def prompts(chance: random.Random) -> list[int]:
    """Return a prompt that shares a beginning with others, and ends anywhere."""
    system = random.Random(chance.randrange(6))
    shared = [system.randrange(1000) for _ in range(200)][: chance.randrange(200)]
    return shared + [chance.randrange(1000) for _ in range(chance.choice([0, 1, SIZE, 30]))] or [1]


@pytest.mark.parametrize("objects", [30, 120, 4000])
@pytest.mark.parametrize(("blocks", "batched"), [(40, 1000), (40, 48), (300, 1000)])
def test_a_request_reuses_what_was_predicted(objects: int, blocks: int, batched: int) -> None:
    """With stores that are too small, evictions on both sides, and prefills in chunks; the pool is what gives most."""
    chance = random.Random(f"{objects} {blocks} {batched}")
    fleet = Fleet(objects, blocks, batched)
    from_pool = 0
    for number in range(150):
        prompt, replica = prompts(chance), chance.choice(fleet.replicas)
        predicted = fleet.world.reach(plain(prompt))[replica.rank.holder]
        replica.engine.submit(Request(str(number), prompt, completion_of(prompt, chance.randrange(1, 20))))
        assert fleet.run(replica) == {str(number): predicted.tokens}
        from_pool += predicted.by_tier.get("pool", 0)
        assert fleet.world.judgement().state == "live"
        fleet.store.now_s += chance.choice([0.0, LEASE_S])
        fleet.tell()
    assert from_pool > 50
    assert from_pool == sum(replica.engine.hits.found_outside for replica in fleet.replicas)


def test_many_requests_at_once_come_to_an_end() -> None:
    """Loads, preemptions and aborts among requests that do not fit together; no block is lost, no request forgotten."""
    chance = random.Random(7)
    fleet = Fleet(300, 40, 64)
    left: set[str] = set()
    for number in range(400):
        replica = chance.choice(fleet.replicas)
        prompt = prompts(chance)
        replica.engine.submit(Request(str(number), prompt, completion_of(prompt, chance.randrange(1, 40))))
        left.add(str(number))
        if chance.random() < 0.1:
            aborted = str(chance.randrange(number + 1))
            for one in fleet.replicas:
                one.engine.abort(aborted)
            left.discard(aborted)
        for one in fleet.replicas:
            for _ in range(chance.randrange(12)):
                if one.engine.busy:
                    left -= set(one.step())
        fleet.store.now_s += 1.0
    for one in fleet.replicas:
        left -= set(fleet.run(one))
        assert one.pool.free_blocks * SIZE == one.pool.capacity_tokens
        assert {name for _, name in one.rank.mirror.engine_table("gpu")} == set(one.pool.table())
    assert not left
    assert sum(one.engine.hits.found_outside for one in fleet.replicas) > 1000
