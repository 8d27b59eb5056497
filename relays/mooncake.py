"""Decoder of Mooncake's master: one message in, what it says of each model out; pure.

Source: engines/other-engines.md 4.1.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from relays.batches import Refused, read_hashes, read_payload, read_struct
from relays.engine_events import EngineEvent, RejectReason, Removed, Stored
from relays.stores import StoreMessage, conclude
from schemas.errors import ConfigError
from schemas.mooncake import ObjectBatch, ObjectEvent
from schemas.profiles import Tier

TIERS: dict[str | None, Tier] = {"cpu": "host", "disk": "disk"}
"""By medium."""

DEFAULT_KEY_PATTERN = (
    r"(?P<model>.+?)@tp(?:_rank:)?(?P<tp>\d{1,4})(?:@pcp(?P<pcp>\d{1,4}))?(?:@dcp(?P<dcp>\d{1,4}))?"
    r"(?:@pp_rank:(?P<pp>\d{1,4}))?(?:@group:(?P<group>\d{1,4}))?@(?P<hash>[0-9a-fA-F]{1,128})"
)
"""Keys of Mooncake's objects as vLLM's store connector makes them; a deployment may set its own.

A deployment's `cache_prefix` stands before the model's name and counts as a part of it. Source: vLLM
distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py (PoolKey.build_prefix), and the shorter form without
ranks of pipeline and context parallelism of the samples in engines/other-engines.md 4.1.
"""

_batches = msgspec.msgpack.Decoder(ObjectBatch)
_events = msgspec.msgpack.Decoder(ObjectEvent)


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
    batch = read_payload(payload, _batches.decode, lambda batch: batch.events)
    return conclude(batch.ts_ms / 1000, batch.events, lambda raw: _object(raw, pattern))


def _object(raw: msgspec.Raw, pattern: KeyPattern) -> tuple[str, EngineEvent]:
    event = read_struct(_events, raw)
    kind = event.event_type or {"BlockStored": "stored", "BlockRemoved": "removed"}.get(event.type or "")
    if kind not in ("stored", "removed"):
        raise Refused(RejectReason.UNKNOWN_EVENT, f"event_type: {event.event_type!r}, type: {event.type!r}")
    model, shard, hashes = _object_names(event, pattern)
    # the last replica's removal says `cpu` even for a disk object: any removal ends the block in every tier
    tier = TIERS.get(event.medium, "other")
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
