"""What is predicted for a vLLM replica beside LMCache's server, against LMCache's rule in a few lines.

The rule: the longest run of whole chunks from the prompt's start that the server holds, or the device's own run where
that is longer; a prompt that is there to its end keeps its last token to compute. Source: lmcache 0.5.6,
integration/vllm/lmcache_mp_connector.py (get_num_new_matched_tokens), v1/multiprocess/modules/lookup.py (lookup).
"""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from index.fold import Flush, fold
from index.hashing import pack_tokens
from index.lookup import Prompt, ask, reaches
from index.match import Reach
from index.memory_store import MemoryStore
from relays.dialects import EngineSettings, vllm_profile
from relays.engine_events import EngineEvent, Removed, Stored
from relays.lmcache_mp import lmcache_profile
from relays.mirror import Mirror
from relays.pools.pool import PoolModel
from relays.records import Voice
from schemas.events import Record
from schemas.profiles import Holder, PoolUse
from tests.support.lmcache_frames import CHUNK, read, recorded
from tests.support.lmcache_server import LmcacheServer, names_of

UNIT = 16
POOL, ELSEWHERE = "node7", "node8"
USES = (PoolUse(POOL, "tokens", ("host",)),)


class Node:
    """One replica, the server beside it, another node's server, and the index that hears of all."""

    def __init__(self) -> None:
        profile = vllm_profile("m", "r", "0.32.0", EngineSettings(block_size=UNIT, lmcache="mp", pools=USES))
        self.mirror = Mirror(profile)
        self._voice = Voice(Holder("r", 0), 1)
        self.pool, self.elsewhere = (PoolModel(lmcache_profile("m", name, CHUNK), 1) for name in (POOL, ELSEWHERE))
        self._store = MemoryStore()
        self._sequence = 0

    async def setup(self) -> None:
        """Prepare the index."""
        await self._store.setup("m")

    async def reach(self, tokens: Sequence[int]) -> Reach:
        """Return what is predicted for a prompt, after all that was said is in the index."""
        pools = (self.pool, self.elsewhere)
        for records in (self._told(), *(pool.speak() for pool in pools)):
            await self._store.apply(Flush("m", None, fold(list(records))))
        own = ask(Holder("r", 0), self.mirror.profile)
        asked = [ask(Holder(pool.mirror.profile.name, None), pool.mirror.profile) for pool in pools]
        answers = await reaches(self._store, Prompt("m", len(tokens), pack_tokens(tokens)), [own], asked)
        return answers[own.holder]

    def _told(self) -> Iterator[Record]:
        self._sequence += 1
        return self._voice.speak(self.mirror, {"0": self._sequence}, 0.0)


def hear(pool: PoolModel, server: LmcacheServer) -> None:
    """Give a pool what its server has recorded since."""
    cursor = pool.received.get("grpc", 0)
    batch = read(server.batch("m", cursor), model="m")
    pool.apply(batch.decoded.events, "grpc", batch.decoded.sequence, 0.0, 0.0)


class Device:
    """The replica's own blocks, by their names."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, None] = {}

    def store(self, tokens: Sequence[int]) -> list[EngineEvent]:
        """Hold a prompt's whole blocks; return what the engine announces."""
        names = names_of(tokens, UNIT)
        events: list[EngineEvent] = []
        for number, name in enumerate(names):
            if name not in self.blocks:
                self.blocks[name] = None
                part = list(tokens[number * UNIT : (number + 1) * UNIT])
                events.append(
                    Stored(hashes=(name,), parent=names[number - 1] if number else None, tokens=part, block_size=UNIT)
                )
        return events

    def drop(self, names: Sequence[bytes]) -> list[EngineEvent]:
        """Lose blocks."""
        for name in names:
            del self.blocks[name]
        return [Removed(hashes=tuple(names))]

    def hit(self, tokens: Sequence[int]) -> int:
        """Return the tokens of the unbroken run from the start, all but the last token at most."""
        names = names_of(tokens[:-1], UNIT)
        return next((n for n, name in enumerate(names) if name not in self.blocks), len(names)) * UNIT


def rule(device_tokens: int, found_tokens: int, prompt_tokens: int) -> int:
    """Return how many tokens LMCache's connector makes vLLM reuse."""
    return max(device_tokens, found_tokens - 1 if found_tokens == prompt_tokens else found_tokens)


def prompts(rng: Random, count: int) -> Iterator[list[int]]:
    """Yield prompts of up to five chunks that share beginnings; some end with a chunk, or with a block."""
    roots = [[rng.randrange(5000) for _ in range(5 * CHUNK)] for _ in range(3)]
    for _ in range(count):
        root = rng.choice(roots)
        shared = root[: rng.randrange(0, len(root) + 1, UNIT)]
        total = rng.choice([rng.randint(1, 5) * CHUNK, rng.randint(1, 5 * CHUNK), rng.randint(1, 80) * UNIT])
        yield [*shared, *(rng.randrange(5000) for _ in range(total))][:total]


@pytest.mark.parametrize("seed", range(4))
async def test_the_prediction_is_lmcaches_rule(seed: int) -> None:
    """Chunks of 256 tokens beside blocks of 16, with holes in both: the reach is the rule's, token by token.

    Another node's server has all chunks, and is not read: without it the index would not look past a hole.
    """
    rng = Random(seed)
    server, other, node, device = LmcacheServer(CHUNK), LmcacheServer(CHUNK), Node(), Device()
    await node.setup()
    kinds = set()
    for tokens in prompts(rng, 120):
        found, own = server.found("m", tokens), device.hit(tokens)
        reach = await node.reach(tokens)
        assert reach.tokens == rule(own, found, len(tokens))
        assert sum(reach.by_tier.values()) == reach.tokens
        assert reach.by_tier.get("pool", 0) == reach.tokens - own == sum(reach.pools.get(POOL, {}).values())
        kinds.add((own > 0, found > own, found == len(tokens)))
        # what a replica computes it keeps, and hands on by whole chunks; both forget whatever they like
        events = device.store(tokens)
        other.store("m", tokens)
        if rng.random() < 0.7:
            server.store("m", tokens)
        if rng.random() < 0.6:
            events += device.drop(rng.sample(list(device.blocks), len(device.blocks) // rng.choice([2, 30])))
        if rng.random() < 0.3 and server.resident.get("m"):
            server.evict("m", *rng.sample(list(server.resident["m"]), 1 + len(server.resident["m"]) // 4))
        node.mirror.apply(events)
        hear(node.pool, server)
        hear(node.elsewhere, other)
    assert kinds >= {(False, True, False), (True, True, False), (True, False, False), (True, True, True)}


async def test_a_chunk_that_only_follows_the_device_is_not_reached() -> None:
    """LMCache looks a prompt up from its start: what the device holds of it does not bridge a missing chunk."""
    server, other, node, device = LmcacheServer(CHUNK), LmcacheServer(CHUNK), Node(), Device()
    await node.setup()
    tokens = list(range(3 * CHUNK + 1))
    names = server.store("m", tokens)
    server.evict("m", names[0])
    other.store("m", tokens)
    hear(node.pool, server)
    hear(node.elsewhere, other)
    node.mirror.apply(device.store(tokens[:CHUNK]))
    assert await node.reach(tokens) == Reach(CHUNK, {"gpu": CHUNK})
    server.store("m", tokens)
    hear(node.pool, server)
    assert await node.reach(tokens) == Reach(
        3 * CHUNK,
        {"gpu": CHUNK, "pool": 2 * CHUNK},
        pools={POOL: {"host": 2 * CHUNK}},
        marks=(f"pool {POOL}: namespaces_unchecked",),
    )


@pytest.mark.parametrize("recording", ["plain", "tp2"])
async def test_the_prediction_is_what_the_real_server_found(recording: str) -> None:
    """At each look-up of a recording, with an empty device: the chunks that LMCache itself found."""
    node = Node()
    await node.setup()
    compared = 0
    for line in recorded(recording):
        if line.frame:
            batch = read(line.payload)
            node.pool.apply(batch.decoded.events, "grpc", batch.decoded.sequence, 0.0, 0.0)
        elif line.lookup is not None:
            tokens, found = line.lookup.tokens, line.lookup.chunks * CHUNK
            assert (await node.reach(tokens)).tokens == rule(0, found, len(tokens))
            compared += 1
    assert compared > 25
