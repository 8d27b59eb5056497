"""Chains of many bands on Redis against the memory store: forks, evictions, all gaps, and what is left in the end."""

import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio as aioredis

from index.hashing import pack_hashes
from index.memory_store import MemoryStore
from index.redis_store import RedisStore
from index.store import Found
from schemas.profiles import Holder
from schemas.topics import model_slug
from tests.support.writes import part, put, write

HOLDERS = [Holder(f"r{number}", 0) for number in range(4)]
STEPS = 120
GAPS = (0, 3, 100, 127, 128, 200, (1 << 31) - 1)
_HEAD = struct.Struct("<B8s8sIHI")


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator["aioredis.Redis"]:
    """A plain connection to the server."""
    connected = aioredis.Redis.from_url(redis_url)
    yield connected
    await connected.aclose()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_long_chains_are_found_as_in_memory(
    redis_url: str, client: "aioredis.Redis", unique_name: str, seed: int, shards: int
) -> None:
    """Whatever was stored and evicted, in whatever tiers, a lookup names the same blocks on both stores."""
    rng = random.Random(seed)
    memory, redis = MemoryStore(), RedisStore.from_urls([redis_url], shards)
    for store in (memory, redis):
        await store.setup(unique_name)
    chains = _forked(rng)
    sequence = dict.fromkeys(HOLDERS, 0)
    for _ in range(STEPS):
        holder, chain = rng.choice(HOLDERS), rng.choice(chains)
        sequence[holder] += 1
        first = rng.choice((0, rng.randrange(len(chain))))
        last = min(len(chain), first + rng.choice((1, 5, 40, 300, 1500)))
        change = write(
            part(chain, first, last, rng.choice((0, 0, 1, 1, 1, 2, 3))), sequence=sequence[holder], holder=holder
        )
        assert await put(memory, unique_name, change) == await put(redis, unique_name, change)
        asked = _cut(rng, rng.choice(chains))
        for gap in GAPS:
            held = _blocks(await memory.find(unique_name, asked, gap=gap))
            # it may look further than it must
            end = max((number for _, number in held), default=-1)
            found = _blocks(await redis.find(unique_name, asked, gap=gap))
            assert {place: residency for place, residency in found.items() if place[1] <= end} == held
    await _check_segments(client, unique_name, shards)
    for holder in HOLDERS:
        await put(redis, unique_name, write(holder=holder, life=2))
    await redis.sweep(unique_name)
    assert not await _segments(client, unique_name, shards)
    await redis.close()


def _forked(rng: random.Random) -> list[list[int]]:
    """Return chains of up to 1500 blocks, most of which fork from an earlier one somewhere."""
    chains: list[list[int]] = []
    for _ in range(10):
        begun: list[int] = []
        if chains and rng.random() < 0.7:
            other = rng.choice(chains)
            begun = other[: rng.randrange(1, len(other) + 1)]
        chains.append(begun + [rng.getrandbits(64) for _ in range(rng.randrange(1, 1500))])
    return chains


def _cut(rng: random.Random, chain: Sequence[int]) -> bytes:
    """Return a prompt that follows a chain to its end or part of the way."""
    known = list(chain)
    if rng.random() < 0.7:
        known = known[: rng.randrange(1, len(known) + 1)]
        known += [rng.getrandbits(64) for _ in range(rng.choice((0, 1, 5, 200, 600)))]
    return pack_hashes(known)


def _blocks(found: Found) -> dict[tuple[Holder, int], int]:
    return {
        (holder, number): run.residency
        for holder, runs in found.runs.items()
        for run in runs
        for number in range(run.start, run.start + run.length)
    }


async def _segments(client: "aioredis.Redis", model: str, shards: int) -> list[tuple[bytes, bytes]]:
    """Return (key base, first hash) of every segment."""
    bases = [f"{{{model_slug(model)}.{shard}}}".encode() for shard in range(shards)]
    return [
        (base, key[len(base) + 1 :])
        for base in bases
        for kind in (b"s", b"h")
        async for key in client.scan_iter(match=base + kind + b"*", count=1000)
    ]


async def _check_segments(client: "aioredis.Redis", model: str, shards: int) -> None:
    """Every segment has its hashes, and every band's first segment counts the others."""
    places = Counter(await _segments(client, model, shards))
    assert set(places.values()) <= {2}
    branches: Counter[tuple[bytes, bytes]] = Counter()
    counted: dict[tuple[bytes, bytes], int] = {}
    for base, first in places:
        values: Any = await client.mget(base + b"s" + first, base + b"h" + first)
        value, hashes = values
        blocks, last, trunk, count, plain, other = _HEAD.unpack_from(value)
        assert len(hashes) == blocks * 8
        assert (hashes[:8], hashes[-8:]) == (first, last)
        assert len(value) == _HEAD.size + plain * 5 + other
        assert plain or other or count
        counted[base, first] = count
        if first != trunk:
            branches[base, trunk] += 1
    assert counted == {place: branches[place] for place in places}
    assert branches.keys() <= places.keys()
