"""Decoder of vLLM's KV events, 0.11 to 0.32: frames in, engine events out; pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from relays.engine_events import (
    Cleared,
    Decoded,
    EngineEvent,
    EngineHash,
    MediaKey,
    Reject,
    RejectReason,
    Removed,
    Stored,
    normalize_hash,
)
from schemas.errors import FrameError
from schemas.profiles import Group, GroupKind, Tier
from schemas.vllm import (
    SPEC_KINDS,
    AllBlocksCleared,
    ArrayEvent,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    MapBatch,
)

TIER_SPELLINGS: dict[str | None, Tier] = {
    None: "gpu",
    "": "gpu",
    "GPU": "gpu",
    "DEVICE": "gpu",
    "CPU": "host",
    "cpu": "host",  # the Mooncake store connector
    "FS": "disk",  # 0.26 and 0.27; STORAGE from 0.28
    "STORAGE": "disk",
    "DISK": "disk",
    "disk": "disk",
    "OBJ": "pool",
    "EXTERNAL": "pool",
}
"""Spellings of the tier in vLLM's events (engines/vllm-events.md 1.3); any other is `other`."""

MAX_PAYLOAD_BYTES = 32 << 20
MAX_EVENTS = 100_000
MAX_BLOCK_SIZE = 1 << 20
MAX_KEYS = 1024  # extra keys of one block
_MAX_TOKEN = (1 << 32) - 1
_MAX_GROUP = 64

_batches = msgspec.msgpack.Decoder(Batch)
_map_batches = msgspec.msgpack.Decoder(MapBatch)
_events = msgspec.msgpack.Decoder(Event)
_array_events = msgspec.msgpack.Decoder(ArrayEvent)
_BROKEN = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)


class Source(msgspec.Struct, frozen=True):
    """What the decoder must know about who is speaking."""

    hash_bits: int = 64
    adapters: dict[str, str] = {}
    multiple_groups: bool = True  # False: one group whatever an event says (up to 0.19)


def decode(frames: Sequence[bytes], source: Source) -> Decoded:
    """Return what one published message says.

    Raises:
        FrameError: the message is no vLLM batch; nothing of it can be used.
    """
    if len(frames) != 3:
        raise FrameError("frame_count", f"{len(frames)} frames, expected 3")
    if len(frames[1]) != 8:
        raise FrameError("sequence", f"{len(frames[1])} bytes, expected 8")
    return decode_payload(int.from_bytes(frames[1], "big"), frames[2], source)


def decode_payload(sequence: int, payload: bytes, source: Source) -> Decoded:
    """Return what a batch says; refused events are listed beside the others.

    Raises:
        FrameError: the payload is no batch.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError("payload_bytes", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}")
    batch = _decode_batch(payload)
    if len(batch.events) > MAX_EVENTS:
        raise FrameError("event_count", f"{len(batch.events)} events, at most {MAX_EVENTS}")
    events: list[EngineEvent] = []
    rejects: list[Reject] = []
    for position, raw in enumerate(batch.events):
        try:
            events.append(_conclude(_decode_event(raw), source))
        except _Refused as refused:
            rejects.append(Reject(refused.reason, position, refused.detail))
    return Decoded(sequence, batch.ts, batch.data_parallel_rank, tuple(events), tuple(rejects))


class _Refused(Exception):
    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def _decode_batch(payload: bytes) -> Batch | MapBatch:
    is_map = payload[:1] and (0x80 <= payload[0] <= 0x8F or payload[0] in (0xDE, 0xDF))
    try:
        batch: Batch | MapBatch = _map_batches.decode(payload) if is_map else _batches.decode(payload)
    except _BROKEN as error:
        raise FrameError("batch_malformed", _first_line(error)) from error
    if batch.data_parallel_rank is not None and not 0 <= batch.data_parallel_rank < 1 << 16:
        raise FrameError("rank", f"data_parallel_rank: {batch.data_parallel_rank}")
    return batch


def _decode_event(raw: msgspec.Raw) -> Event | ArrayEvent:
    first = bytes(memoryview(raw)[:1])
    is_array = bool(first) and (0x90 <= first[0] <= 0x9F or first[0] in (0xDC, 0xDD))
    try:
        event: Event | ArrayEvent = _array_events.decode(raw) if is_array else _events.decode(raw)
    except msgspec.ValidationError as error:
        reason = RejectReason.UNKNOWN_EVENT if "Invalid value" in str(error) else RejectReason.MALFORMED
        raise _Refused(reason, _first_line(error)) from error
    except _BROKEN as error:
        raise _Refused(RejectReason.MALFORMED, _first_line(error)) from error
    return event


def _conclude(event: Event | ArrayEvent, source: Source) -> EngineEvent:
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    if isinstance(event, BlockRemoved):
        return Removed(
            hashes=_hashes(event.block_hashes, source),
            tier=TIER_SPELLINGS.get(event.medium, "other"),
            group=_group(event.group_idx, source),
        )
    return _stored(event, source)


def _stored(event: BlockStored, source: Source) -> Stored:
    if event.locality == "REMOTE":
        raise _Refused(RejectReason.LOCALITY, "a block of another node")
    hashes = _hashes(event.block_hashes, source)
    group = _group(event.group_idx, source)
    tier = TIER_SPELLINGS.get(event.medium, "other")
    if not event.token_ids:
        return Stored(hashes=hashes, tier=tier, group=group)
    _check_tokens(event, len(hashes))
    adapter, known = _adapter(event, source)
    salt, media = _extra_keys(event, adapter)
    parent = event.parent_block_hash
    return Stored(
        hashes=hashes,
        parent=None if parent is None else normalize_hash(parent, source.hash_bits),
        tokens=event.token_ids,
        block_size=event.block_size,
        tier=tier,
        group=group,
        group_spec=_group_spec(event, group),
        adapter=adapter,
        salt=salt,
        namespace_known=known,
        media=media,
    )


def _check_tokens(event: BlockStored, hashes: int) -> None:
    size, count = event.block_size, len(event.token_ids)
    if not 0 < size <= MAX_BLOCK_SIZE:
        raise _Refused(RejectReason.BLOCK_SIZE, f"block_size: {size}")
    # masked stores have fewer hashes than their tokens fill blocks, never more (engines/vllm-events.md 4.3)
    if count % size or count // size < hashes:
        raise _Refused(RejectReason.TOKEN_COUNT, f"token_ids: {count} for {hashes} blocks of {size}")
    if min(event.token_ids) < 0 or max(event.token_ids) > _MAX_TOKEN:
        raise _Refused(RejectReason.TOKEN_RANGE, f"token_ids: outside 0..{_MAX_TOKEN}")


def _hashes(values: list[EngineHash], source: Source) -> tuple[EngineHash, ...]:
    for position, value in enumerate(values):
        if isinstance(value, bytes) and not 8 <= len(value) <= 64:
            raise _Refused(RejectReason.HASH, f"block_hashes[{position}]: {len(value)} bytes")
    return tuple(normalize_hash(value, source.hash_bits) for value in values)


def _group(index: int | None, source: Source) -> int:
    if index is None or not source.multiple_groups:
        return 0
    if not 0 <= index < _MAX_GROUP:
        raise _Refused(RejectReason.GROUP, f"group_idx: {index}")
    return index


def _group_spec(event: BlockStored, group: int) -> Group | None:
    """Return what the event says of its group (0.22 and newer), or None where no rule here fits its kind."""
    kind = SPEC_KINDS.get(event.kv_cache_spec_kind or "")
    if kind is None:
        return None
    window = event.kv_cache_spec_sliding_window if kind == "window" else None
    if kind == "window" and not window:
        return None
    group_kind: GroupKind = kind  # type: ignore[assignment]  # SPEC_KINDS' values are the group kinds
    return Group(group, group_kind, event.block_size, window)


def _adapter(event: BlockStored, source: Source) -> tuple[str | None, bool]:
    """Return the adapter's name, and whether the namespace is known at all; an id alone is no identity."""
    if event.lora_name is not None:
        return event.lora_name, True
    if event.lora_id is None:
        return None, True
    name = source.adapters.get(str(event.lora_id))
    return name, name is not None


def _extra_keys(event: BlockStored, adapter: str | None) -> tuple[str | None, tuple[tuple[MediaKey, ...], ...]]:
    """Return the salt (seen in a prompt's first block only) and each block's media keys.

    Published untagged, in the order adapter, media, salt, embedding digest: a name, [identifier, offset], a text,
    32 bytes (v1/core/kv_cache_utils.py to_event_extra_keys, 0.31).
    """
    if not event.extra_keys or not any(event.extra_keys):
        return None, ()
    if len(event.extra_keys) != len(event.block_hashes):
        raise _Refused(
            RejectReason.EXTRA_KEYS, f"extra_keys: {len(event.extra_keys)} for {len(event.block_hashes)} blocks"
        )
    salt: str | None = None
    media: list[tuple[MediaKey, ...]] = []
    for position, keys in enumerate(event.extra_keys):
        texts, block_media = _sort_keys(keys or [], position)
        if adapter is not None and texts and texts[0] == adapter:
            texts = texts[1:]
        if len(texts) > 1 or (texts and (position or event.parent_block_hash is not None)):
            raise _Refused(RejectReason.EXTRA_KEYS, f"extra_keys[{position}]: a text that is neither adapter nor salt")
        if texts:
            salt = texts[0]
        media.append(block_media)
    return salt, tuple(media) if any(media) else ()


def _sort_keys(keys: list[Any], block: int) -> tuple[list[str], tuple[MediaKey, ...]]:
    if len(keys) > MAX_KEYS:
        raise _Refused(RejectReason.LIMIT, f"extra_keys[{block}]: {len(keys)} keys, at most {MAX_KEYS}")
    texts: list[str] = []
    media: list[MediaKey] = []
    for key in keys:
        match key:
            case str():
                texts.append(key)
            case [str() as identifier, int() as offset]:
                media.append(MediaKey(identifier, offset))
            case bytes():
                media.append(MediaKey(f"embeds:{key.hex()}", 0))
            case _:
                raise _Refused(RejectReason.EXTRA_KEYS, f"extra_keys[{block}]: a {type(key).__name__}")
    return texts, tuple(media)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
