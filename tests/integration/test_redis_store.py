"""What only the Redis store can get wrong: several processes, slots, lost data, a server that is away."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import redis.asyncio as aioredis

from index.digests import index_digest
from index.fold import BandRun, Cursor, Flush
from index.hashing import pack_hashes
from index.redis_store import RedisStore
from index.store import Applied
from schemas.errors import ConfigError, StaleIndex, StoreUnavailable
from schemas.profiles import Holder
from schemas.topics import model_slug
from tests.support.engines import HOLDER, profile
from tests.support.writes import part, put, runs, write

CHAIN = list(range(1_000, 1_300))
OTHER = Holder("r", 1)


@pytest.fixture
async def stores(redis_url: str, unique_name: str) -> AsyncIterator[tuple[RedisStore, RedisStore]]:
    """Two processes' stores over one server and three shards, both set up."""
    one, two = (RedisStore.from_urls([redis_url], 3) for _ in range(2))
    await one.setup(unique_name)
    await two.setup(unique_name)
    yield one, two
    await one.close()
    await two.close()


@pytest.fixture
async def lone(redis_url: str, unique_name: str) -> AsyncIterator[RedisStore]:
    """A store with a single shard, set up."""
    store = RedisStore.from_urls([redis_url])
    await store.setup(unique_name)
    yield store
    await store.close()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator["aioredis.Redis"]:
    """A plain connection to the server."""
    connected = aioredis.Redis.from_url(redis_url)
    yield connected
    await connected.aclose()


async def keys_of(client: "aioredis.Redis", model: str) -> list[bytes]:
    return [key async for key in client.scan_iter(match=f"{{{model_slug(model)}.*", count=1000)]


def expected_of(model: str) -> list[bytes]:
    """Return the keys that say who is expected."""
    return [f"{{{model_slug(model)}.0}}{name}".encode() for name in "bp"]


async def segments_of(client: "aioredis.Redis", model: str) -> list[bytes]:
    return [key for key in await keys_of(client, model) if b"}s" in key]


async def test_a_reader_sees_what_another_process_wrote(
    stores: tuple[RedisStore, RedisStore], unique_name: str
) -> None:
    """New holders, lives and epochs are named rightly by a reader that has known an older table."""
    writer, reader = stores
    for life in (1, 2):
        await put(writer, unique_name, write(part(CHAIN[: life * 3]), life=life))
        assert await runs(reader, unique_name, CHAIN) == {"r/0": [(0, life * 3, 1)]}
    await put(writer, unique_name, write(part(CHAIN), holder=OTHER), write(sequence=2, life=2, epoch=2))
    assert await runs(reader, unique_name, CHAIN) == {"r/1": [(0, 300, 1)]}


async def test_a_partition_may_change_its_worker_and_come_back(
    stores: tuple[RedisStore, RedisStore], unique_name: str
) -> None:
    """A worker that was overtaken by another one's clear loses none of what it writes afterwards."""
    one, two = stores
    await put(one, unique_name, write(part(CHAIN[:2])))
    await put(two, unique_name, write(part(CHAIN[:5]), sequence=2, epoch=2))
    assert await put(one, unique_name, write(part(CHAIN[:9]), sequence=3)) == Applied(applied=1)
    assert await runs(one, unique_name, CHAIN) == {"r/0": [(0, 9, 1)]}


async def test_a_life_begun_by_another_worker_goes_on_in_its_epoch(
    stores: tuple[RedisStore, RedisStore], unique_name: str
) -> None:
    """A worker that has known only the life before writes into the epoch that the new life has reached."""
    one, two = stores
    await put(one, unique_name, write(part(CHAIN[:2])))
    await put(two, unique_name, write(part(CHAIN[:5]), life=2), write(sequence=2, life=2, epoch=2))
    assert await put(one, unique_name, write(part(CHAIN[:9]), sequence=3, life=2)) == Applied(applied=1)
    assert await runs(one, unique_name, CHAIN) == {"r/0": [(0, 9, 1)]}


async def test_two_workers_applying_one_record_count_it_once(
    stores: tuple[RedisStore, RedisStore], unique_name: str
) -> None:
    """Redelivery to another process, at once, is a repeat on each shard."""
    flush = Flush(unique_name, None, [write(part(CHAIN))])
    replies = await asyncio.gather(*(store.apply(flush) for store in stores))
    assert sorted((reply.applied, reply.repeated) for reply in replies) == [(0, 1), (1, 0)]
    assert await runs(stores[0], unique_name, CHAIN) == {"r/0": [(0, 300, 1)]}


async def test_sweeping_frees_what_dead_lives_left(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """After a sweep only the live holder's blocks are stored, answers and digests are as before, slots come back."""
    store, _ = stores
    for life in range(1, 6):
        await put(store, unique_name, write(part(range(life * 10_000, life * 10_000 + 200)), life=life))
    await put(store, unique_name, write(part(CHAIN), holder=OTHER))
    assert len(await segments_of(client, unique_name)) == 5 * 2 + 3
    digests = [await store.digest(unique_name, holder) for holder in (HOLDER, OTHER)]
    assert await store.sweep(unique_name) == 4
    assert len(await segments_of(client, unique_name)) == 2 + 3
    assert [await store.digest(unique_name, holder) for holder in (HOLDER, OTHER)] == digests
    assert await store.sweep(unique_name) == 0
    await put(store, unique_name, write(part(CHAIN[:7]), holder=Holder("s", 0)))
    assert (await runs(store, unique_name, CHAIN))["s/0"] == [(0, 7, 1)]


async def test_a_store_that_lost_its_data_is_stale(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """Once its keys are gone every call says so, until it is set up again, empty."""
    store, _ = stores
    await put(store, unique_name, write(part(CHAIN)))
    await client.delete(*await keys_of(client, unique_name))
    with pytest.raises(StaleIndex):
        await store.find(unique_name, pack_hashes(CHAIN))
    with pytest.raises(StaleIndex):
        await store.holders(unique_name)
    with pytest.raises(StaleIndex):
        await put(store, unique_name, write(sequence=2))
    assert await store.setup(unique_name) is True
    assert await runs(store, unique_name, CHAIN) == {}


async def test_a_worker_of_an_earlier_incarnation_is_stale(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """A process that did not notice the loss cannot write into what another one set up anew."""
    old, new = stores
    await put(old, unique_name, write(part(CHAIN)))
    await client.delete(*await keys_of(client, unique_name))
    await new.setup(unique_name)
    with pytest.raises(StaleIndex):
        await put(old, unique_name, write(part(CHAIN), sequence=2))
    assert await runs(new, unique_name, CHAIN) == {}


async def test_a_reader_names_no_holders_of_an_earlier_incarnation(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """One that asked before a loss and again after it, when as many holders are known, hears of the new ones."""
    reader, writer = stores
    for holder in (HOLDER, OTHER):
        await client.delete(*await keys_of(client, unique_name))
        await writer.setup(unique_name)
        await put(writer, unique_name, write(part(CHAIN), holder=holder))
        assert await runs(reader, unique_name, CHAIN) == {str(holder): [(0, 300, 1)]}


async def test_a_reader_does_not_take_over_what_a_failover_lost(
    lone: RedisStore, redis_url: str, unique_name: str, client: "aioredis.Redis"
) -> None:
    """The server that takes over gives a slot to another holder, at a version that the reader has heard before."""
    reader = RedisStore.from_urls([redis_url])
    await put(lone, unique_name, write(part(CHAIN)))
    assert await runs(reader, unique_name, CHAIN) == {"r/0": [(0, 300, 1)]}
    version: Any = await client.get(f"{{{model_slug(unique_name)}.0}}v")
    await client.delete(*[key for key in await keys_of(client, unique_name) if not key.endswith(b"}i")])
    await client.client_kill_filter(_type="normal")
    other = RedisStore.from_urls([redis_url])
    await other.setup(unique_name)
    await put(other, unique_name, write(part(CHAIN), holder=OTHER))
    await client.set(f"{{{model_slug(unique_name)}.0}}v", version)
    with suppress(StoreUnavailable):  # a connection that broke may be heard of
        await runs(reader, unique_name, CHAIN)
    assert await runs(reader, unique_name, CHAIN) == {"r/1": [(0, 300, 1)]}
    await reader.close()
    await other.close()


async def test_a_model_that_lost_one_shard_begins_anew(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """What is left on the others would have holes: nothing of it stays, nobody writes on, the cursors are gone."""
    store, other = stores
    for lost in range(3):
        await put(store, unique_name, write(part(CHAIN)))
        await store.apply(Flush(unique_name, Cursor("topic", 0, 7), []))
        base = f"{{{model_slug(unique_name)}.{lost}}}"
        await client.delete(*[key async for key in client.scan_iter(f"{base}*", count=1000)])
        with pytest.raises(StaleIndex):
            await put(store, unique_name, write(part(CHAIN), sequence=2))
        with pytest.raises(StaleIndex):
            await store.reload(unique_name)
        assert await other.setup(unique_name, {OTHER: profile()}) is True
        assert sorted(await keys_of(client, unique_name)) == sorted(
            [
                *(f"{{{model_slug(unique_name)}.{n}}}{k}".encode() for n in range(3) for k in "iv"),
                *expected_of(unique_name),
            ]
        )
        assert [row.holder for row in await store.holders(unique_name)] == [OTHER]
        assert await store.cursors(unique_name) == {}
        assert await store.setup(unique_name) is False


async def test_workers_that_set_up_at_once_do_not_undo_each_other(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """All of them notice a loss in the same moment; one begins the model, and all can write."""
    for _ in range(5):
        await client.delete(*await keys_of(client, unique_name))
        made = await asyncio.gather(*(store.setup(unique_name, {OTHER: profile()}) for store in stores))
        assert sorted(made) == [False, True]
        for number, store in enumerate(stores):
            await put(store, unique_name, write(part(CHAIN), holder=Holder("r", 7 + number)))
        assert len(await runs(stores[0], unique_name, CHAIN)) == 2


async def test_another_number_of_shards_is_refused(lone: RedisStore, redis_url: str, unique_name: str) -> None:
    """A process that is configured otherwise would look for blocks where they are not; it changes nothing."""
    await put(lone, unique_name, write(part(CHAIN)))
    other = RedisStore.from_urls([redis_url], 3)
    with pytest.raises(ConfigError, match="shards: 3"):
        await other.setup(unique_name)
    await other.close()
    assert await runs(lone, unique_name, CHAIN) == {"r/0": [(0, 300, 1)]}


async def test_a_failover_that_lost_slots_mixes_no_holders(
    lone: RedisStore, redis_url: str, unique_name: str, client: "aioredis.Redis"
) -> None:
    """A server takes over that did not hear of a slot, and gives it to another holder: each keeps its own blocks."""
    await put(lone, unique_name, write(part(CHAIN[:9])))
    lost = [key for key in await keys_of(client, unique_name) if not key.endswith(b"}i")]
    await client.delete(*lost)
    await client.client_kill_filter(_type="normal")
    other = RedisStore.from_urls([redis_url])
    await other.setup(unique_name)
    await put(other, unique_name, write(part(CHAIN[:5]), holder=OTHER))
    with pytest.raises(StoreUnavailable):
        await put(lone, unique_name, write(part(CHAIN[:7]), sequence=2))
    await put(lone, unique_name, write(part(CHAIN[:7]), sequence=2))
    await other.close()
    assert await runs(lone, unique_name, CHAIN) == {"r/0": [(0, 7, 1)], "r/1": [(0, 5, 1)]}
    assert {row.holder: row.broken for row in await lone.holders(unique_name)} == {HOLDER: True, OTHER: False}


async def test_a_server_that_is_away_is_unavailable(unique_name: str) -> None:
    """Without a connection each call raises StoreUnavailable, which the caller retries."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = RedisStore.from_urls([f"redis://127.0.0.1:{port}/0"], timeout_s=1.0)
    for call in (store.setup(unique_name), store.find(unique_name, b"\1" * 8), store.holders(unique_name)):
        with pytest.raises(StoreUnavailable):
            await call
    await store.close()


async def test_many_holders_may_hold_one_band_in_pieces(lone: RedisStore, unique_name: str) -> None:
    """300 ranks of a hybrid model, each with 64 runs in the band of a shared system prompt, are all found."""
    chain = CHAIN[:128]
    pieces = [BandRun(first, pack_hashes(chain[: first + 1]), 1 + first // 2 % 2) for first in range(128)]
    for number in range(300):
        await put(lone, unique_name, write(pieces, holder=Holder("r", number)))
    found = await runs(lone, unique_name, chain)
    assert len(found) == 300
    expected = [(first, 2, 1 + first // 2 % 2) for first in range(0, 128, 2)]
    assert all(held == expected for held in found.values())
    blocks = [(block, 1 + position // 2 % 2) for position, block in enumerate(chain)]
    assert await lone.digest(unique_name, Holder("r", 299)) == index_digest(blocks)


async def test_shards_are_spread_over_servers_by_their_bands(
    stores: tuple[RedisStore, RedisStore], unique_name: str, client: "aioredis.Redis"
) -> None:
    """Each shard's keys carry their own hash tag, so that a shard can live on one node of a cluster."""
    await put(stores[0], unique_name, write(part([*range(1, 3_000)])))
    tags = {key.split(b"}")[0] for key in await keys_of(client, unique_name)}
    assert tags == {f"{{{model_slug(unique_name)}.{shard}".encode() for shard in range(3)}
