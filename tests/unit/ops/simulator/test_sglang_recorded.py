"""The simulated SGLang cache beside recorded ones: hashes, payloads, and all that they did."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ops.replay.capture import Capture, load_capture
from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.events import GPU, HOST
from ops.simulator.sglang.pages import Hasher, Key, Namespace, key_of
from ops.simulator.sglang.tree import Match
from ops.simulator.sglang.wire import encode_batch
from schemas.batches import Batch
from schemas.sglang import ArrayEvent, BlockStored, BlockStoredArray, Event
from tests.support.captures import recording_of
from tests.support.sglang_frames import Message, recorded_messages

MODELLED = [
    *(f"0.5.10.post1-{name}" for name in ("eagle-p16", "namespaces", "plain-p1", "repeat-split")),
    *(f"0.5.18-{name}" for name in ("eagle-p16", "namespaces", "plain-p1", "repeat-split")),
    *(f"0.5.23-{name}" for name in ("dp-rank1", "eagle-p16", "mm-wide-p16", "ring8")),
    *(f"0.5.23-plain-{name}" for name in ("p1", "p1-pycore", "p16", "p16-pycore")),
    *(f"0.5.23-namespaces-{name}" for name in ("default", "dynamo")),
    *(
        f"0.5.23-hicache-write-through-{name}"
        for name in ("p16", "p16-pycore", "selective-p16", "selective-p16-pycore")
    ),
    "0.5.23-hicache-write-back-p16",
]
ADAPTER_ID = "0123456789abcdef0123456789abcdef"  # in the recordings of namespaces


@pytest.mark.parametrize("name", MODELLED)
def test_a_recorded_cache_and_the_simulated_one_write_the_same_bytes(name: str) -> None:
    """Hits in both tiers, splits, evictions, backups, loads and resets happen as in the real cache."""
    capture = load_capture(recording_of("sglang", name))
    recorded = _Recorded(capture)
    for entry in capture.log:
        recorded.follow(entry)
    assert recorded.is_over
    assert recorded.requests == sum(entry["op"] == "request" for entry in capture.log)


class _Recorded:
    """Makes the recording script's calls on a simulated cache, and compares each outcome with the log's."""

    def __init__(self, capture: Capture) -> None:
        meta = capture.meta
        self._dialect = dialect_of(capture.version, meta["kv_events_config"].get("format", "default"))
        self._size = meta["page_size"]
        self._pairs = bool(meta.get("is_eagle"))
        self._rank = meta.get("publisher_rank", 0)
        self._adapters = {lora["lora_id"]: lora["lora_name"] for lora in [meta.get("lora")] if lora}
        self._cache = Cache(
            self._dialect,
            self._size,
            meta["pool_tokens"] // self._size,
            host_pages=meta.get("host_tokens", 0) // self._size,
            write_policy=meta.get("hicache_write_policy", "write_through"),
        )
        self._frames = iter(capture.published)
        self.requests = 0

    @property
    def is_over(self) -> bool:
        """Return whether all recorded messages were written."""
        return next(self._frames, None) is None

    def follow(self, entry: dict[str, Any]) -> None:
        """Do what one line of the log tells."""
        match entry["op"]:
            case "start":
                self._publish()
            case "request":
                self._request(entry)
            case "probe":
                self._match(self._key(entry), entry)
            case "evict":
                assert self._cache.evict(entry["asked"]["num_tokens"]) == _evicted(entry)
                self._publish()
            case "evict_host":
                assert self._cache.host is not None
                assert self._cache.host.evict(-(-entry["asked"] // self._size)) * self._size == entry["evicted"]
                self._publish()
            case "reset":
                self._cache.reset()
                self._publish()
            case "cache":
                for medium in (GPU, HOST):
                    assert self._cache.table(medium) == sorted(entry.get(medium) or [])

    def _request(self, entry: dict[str, Any]) -> None:
        """Match, load back, allocate, insert and let go, as the recording script did."""
        cache, size = self._cache, self._size
        key = self._key(entry)
        match = self._match(key, entry)
        node, owned = match.device, match.device_pages
        cache.lock(node)
        loaded = cache.load_back(match) if match.host_pages else 0
        assert loaded * size == (entry.get("loaded_back") or 0)
        if loaded:
            self._publish()
            cache.settle()
            cache.unlock(node)
            node, owned = match.best, owned + loaded
            cache.lock(node)
        needed = len(key.pages) - owned
        short = needed - cache.free
        assert (cache.evict(short * size) if short > 0 else 0) == entry["evicted_tokens"]
        cache.take(needed)
        inserted = cache.insert(key, owned=owned, counted=0)
        assert inserted.duplicates == 0
        cache.unlock(node)
        cache.settle()
        self._publish()
        self.requests += 1

    def _match(self, key: Key, entry: dict[str, Any]) -> Match:
        match = self._cache.match(key)
        told = entry["match"]
        assert (match.device_pages * self._size, match.host_pages * self._size) == (told["device"], told["host"])
        return match

    def _key(self, entry: dict[str, Any]) -> Key:
        extra_key = entry.get("extra_key")
        namespace = Namespace(extra_key, entry.get("salt"), self._adapters.get(extra_key or ""))
        return key_of(entry["tokens"], namespace, self._size, pairs=self._pairs)

    def _publish(self) -> None:
        """Compare what would be published now with the next recorded message."""
        events = self._cache.take_events()
        if events:
            payload = next(self._frames).parts[2]
            time_s = msgspec.msgpack.decode(payload)[0]
            assert encode_batch(time_s, events, self._rank, self._dialect) == payload


def _evicted(entry: dict[str, Any]) -> int:
    evicted = entry["evicted"]
    return int(evicted["full"] if isinstance(evicted, dict) else evicted)


@pytest.mark.parametrize("message", recorded_messages(), ids=lambda message: message.name)
def test_a_recorded_batch_is_written_byte_for_byte(message: Message) -> None:
    """Decoded and written again, every kind of message has the bytes that its version sent."""
    batch = msgspec.msgpack.decode(message.payload, type=Batch)
    rank = batch.data_parallel_rank
    assert rank is not None
    assert encode_batch(batch.ts, list(_events(message, batch)), rank, dialect_of(message.version)) == message.payload


@pytest.mark.parametrize("message", recorded_messages(), ids=lambda message: message.name)
def test_recorded_names_of_pages_are_recomputed(message: Message) -> None:
    """A page that begins a prompt has the name that its tokens, salt and adapter give, and so have those behind it."""
    hasher = Hasher(dialect_of(message.version, "dynamo" if "dynamo" in message.name else "default"))
    batch = msgspec.msgpack.decode(message.payload, type=Batch)
    known: dict[int, bytes] = {}
    for event in _events(message, batch):
        if not isinstance(event, BlockStored) or (event.parent_block_hash not in (None, *known)):
            continue
        extra_key = "user-x" if "extra key" in message.name else ADAPTER_ID if event.lora_name else None
        namespace = Namespace(extra_key, event.cache_salt, event.lora_name)
        size = event.block_size
        pages = [tuple(event.token_ids[at : at + size]) for at in range(0, len(event.token_ids), size)]
        before = known.get(event.parent_block_hash) if event.parent_block_hash is not None else None
        digests = hasher.chain(namespace, before, pages)  # type: ignore[arg-type]  # all are tokens, or all pairs
        assert [hasher.announced(namespace, digest) for digest in digests] == event.block_hashes
        known.update(zip(event.block_hashes, digests, strict=True))


def _events(message: Message, batch: Batch) -> Iterator[Event]:
    """Yield a batch's events, positional ones in the named form."""
    dialect = dialect_of(message.version)
    decode = msgspec.msgpack.Decoder(Event if dialect.event_maps else ArrayEvent).decode
    for event in map(decode, batch.events):
        if isinstance(event, BlockStoredArray):
            salt = (event.namespace or {}).get("cache_salt")
            fields = {name: getattr(event, name) for name in event.__struct_fields__ if name != "namespace"}
            yield BlockStored(**fields, cache_salt=salt)
        else:
            yield event
