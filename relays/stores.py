"""Decoders of stores that name blocks by engine hash alone: Mooncake's master and llm-d's file store; pure.

Their events carry neither tokens nor parents; where a block stands is learnt from the replicas that read the pool
(relays/mirror.py, learn_places).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from relays.batches import BROKEN, MAX_EVENTS, MAX_PAYLOAD_BYTES, Refused, first_line, read_hashes
from relays.engine_events import EngineEvent, Reject, RejectReason, Removed, Stored
from schemas.errors import ConfigError, FrameError
from schemas.llmd import FileBatch, FileEvent, FileRemoved
from schemas.mooncake import ObjectBatch, ObjectEvent
from schemas.profiles import Tier

MOONCAKE_TIERS: dict[str | None, Tier] = {"cpu": "host", "disk": "disk"}
LLMD_TIERS: dict[str, Tier] = {"SHARED_STORAGE": "disk", "OBJECT_STORE": "disk"}

DEFAULT_KEY_PATTERN = (
    r"(?P<model>.+?)@tp(?:_rank:)?(?P<tp>\d{1,4})(?:@pcp(?P<pcp>\d{1,4}))?(?:@dcp(?P<dcp>\d{1,4}))?"
    r"(?:@pp_rank:(?P<pp>\d{1,4}))?(?:@group:(?P<group>\d{1,4}))?@(?P<hash>[0-9a-fA-F]{1,128})"
)
"""Keys of Mooncake's objects as vLLM's store connector makes them; a deployment may set its own.

A deployment's `cache_prefix` stands before the model's name and counts as a part of it. Source: vLLM
distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py (PoolKey.build_prefix), and the shorter form without
ranks of pipeline and context parallelism of the samples in engines/other-engines.md 4.1.
"""

AnyBatch = TypeVar("AnyBatch", ObjectBatch, FileBatch)
_object_batches = msgspec.msgpack.Decoder(ObjectBatch)
_object_events = msgspec.msgpack.Decoder(ObjectEvent)
_file_batches = msgspec.msgpack.Decoder(FileBatch)
_file_events = msgspec.msgpack.Decoder(FileEvent)


class StoreMessage(msgspec.Struct, frozen=True):
    """What one message of a store says, for each model in it, by the store's own name of the model."""

    time_s: float
    events: Mapping[str, tuple[EngineEvent, ...]]
    rejects: tuple[Reject, ...] = ()


class Shards(NamedTuple):
    """Over how many ranks a block's tensors are spread: each rank has an object of its own, and all are needed."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    pp: int = 1

    def number(self, ranks: Mapping[str, int]) -> int:
        """Return the number of the object of these ranks, from 0.

        Raises:
            Refused: there is no such rank.
        """
        number = 0
        for name, size in zip(reversed(self._fields), reversed(self), strict=True):
            rank = ranks.get(name, 0)
            if rank >= size:
                raise Refused(RejectReason.GROUP, f"object_key: {name} rank {rank}, {name}_size is {size}")
            number = number * size + rank
        return number


class ObjectName(NamedTuple):
    """What an object's key says."""

    model: str
    shard: int
    hash: int  # low 64 bits of the engine's


class KeyPattern:
    """Reads an object's key: named groups `model`, `tp`, `pcp`, `dcp`, `pp`, `group` and, always there, `hash`."""

    def __init__(self, pattern: str = DEFAULT_KEY_PATTERN, shards: Shards | None = None) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"key_pattern: {pattern!r}: {error}") from error
        if "hash" not in self._pattern.groupindex:
            raise ConfigError(f"key_pattern: {pattern!r} has no group named `hash`")
        self.shards = shards or Shards()

    def read(self, key: str) -> ObjectName | None:
        """Return what a key says, or None where it is not of this form.

        Raises:
            Refused: of a rank that a block should not have, or of a hybrid model's further cache groups.
        """
        match = self._pattern.fullmatch(key)
        if match is None:
            return None
        named = {name: value for name, value in match.groupdict().items() if value}
        try:
            numbers = {name: int(value[:9]) for name, value in named.items() if name not in ("model", "hash")}
            name = int(named["hash"][-16:], 16)
        except (ValueError, KeyError):  # a pattern that takes more than numbers
            return None
        if numbers.pop("group", 0):
            raise Refused(RejectReason.GROUP, "object_key: not of the model's first cache group")
        return ObjectName(named.get("model", ""), self.shards.number(numbers), name)


def decode_mooncake(payload: bytes, pattern: KeyPattern) -> StoreMessage:
    """Return what a message of Mooncake's master says.

    Raises:
        FrameError: the payload is no batch.
    """
    batch = _decode(_object_batches, payload)
    events: defaultdict[str, list[EngineEvent]] = defaultdict(list)
    rejects: list[Reject] = []
    for position, raw in enumerate(batch.events):
        try:
            model, event = _object(raw, pattern)
            events[model].append(event)
        except Refused as refused:
            rejects.append(Reject(refused.reason, position, refused.detail))
    return StoreMessage(batch.ts_ms / 1000, {name: tuple(part) for name, part in events.items()}, tuple(rejects))


def decode_llmd(topic: bytes, payload: bytes) -> StoreMessage:
    """Return what a message of llm-d's publisher says; model and medium stand in its topic.

    Raises:
        FrameError: topic or payload is of another form.
    """
    parts = topic.decode(errors="replace").split("@", 2)
    if len(parts) != 3 or parts[0] != "kv" or parts[1] not in LLMD_TIERS:
        raise FrameError("topic", f"{topic[:80]!r}: expected kv@SHARED_STORAGE@model or kv@OBJECT_STORE@model")
    tier, model = LLMD_TIERS[parts[1]], parts[2]
    batch = _decode(_file_batches, payload)
    events: list[EngineEvent] = []
    rejects: list[Reject] = []
    for position, packed in enumerate(batch.events):
        try:
            events.append(_file(packed, tier))
        except Refused as refused:
            rejects.append(Reject(refused.reason, position, refused.detail))
    return StoreMessage(batch.ts, {model: tuple(events)}, tuple(rejects))


def _decode(decoder: "msgspec.msgpack.Decoder[AnyBatch]", payload: bytes) -> AnyBatch:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError("payload_bytes", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}")
    try:
        batch = decoder.decode(payload)
    except BROKEN as error:
        raise FrameError("batch_malformed", first_line(error)) from error
    if len(batch.events) > MAX_EVENTS:
        raise FrameError("event_count", f"{len(batch.events)} events, at most {MAX_EVENTS}")
    return batch


def _object(raw: msgspec.Raw, pattern: KeyPattern) -> tuple[str, EngineEvent]:
    try:
        event = _object_events.decode(raw)
    except BROKEN as error:
        raise Refused(RejectReason.MALFORMED, first_line(error)) from error
    kind = event.event_type or {"BlockStored": "stored", "BlockRemoved": "removed"}.get(event.type or "")
    if kind not in ("stored", "removed"):
        raise Refused(RejectReason.UNKNOWN_EVENT, f"event_type: {event.event_type!r}, type: {event.type!r}")
    model, shard, hashes = _object_names(event, pattern)
    # the last replica's removal says `cpu` even for a disk object: any removal ends the block in every tier
    tier = MOONCAKE_TIERS.get(event.medium, "other")
    if kind == "stored":
        return model, Stored(hashes=hashes, tier=tier, group=shard, names_chunks=True)
    return model, Removed(hashes=hashes, tier=tier, group=shard, names_chunks=True)


def _object_names(event: ObjectEvent, pattern: KeyPattern) -> tuple[str, int, tuple[int | bytes, ...]]:
    read = pattern.read(event.object_key) if event.object_key else None
    if read is not None:
        return read.model, read.shard, (read.hash,)
    numbers: Sequence[int] = event.seq_hashes or event.block_hashes
    if not numbers:
        raise Refused(RejectReason.HASH, "object_key: no number, and not of the key pattern")
    return "", 0, read_hashes(numbers, 64)


def _file(packed: bytes, tier: Tier) -> EngineEvent:
    try:
        event = _file_events.decode(packed)
    except BROKEN as error:
        raise Refused(RejectReason.MALFORMED, first_line(error)) from error
    hashes = read_hashes(event.block_hashes, 64)
    if isinstance(event, FileRemoved):
        return Removed(hashes=hashes, tier=tier, names_chunks=True)
    return Stored(hashes=hashes, tier=tier, names_chunks=True)
