"""Decoder of vLLM's KV events, 0.11 to 0.32: payloads in, engine events out; pure."""

from typing import Any, Literal

import msgspec

from relays.batches import EventDecoders, Refused, check_tokens, decode_batch, read_hash, read_hashes
from relays.engine_events import (
    Cleared,
    Decoded,
    EngineEvent,
    MediaKey,
    RejectReason,
    Removed,
    Stored,
)
from schemas.profiles import Group, GroupKind, Tier
from schemas.vllm import SPEC_KINDS, AllBlocksCleared, ArrayEvent, BlockRemoved, BlockStored, Event

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

DYNAMO_SPELLINGS: dict[str | None, Tier] = {
    None: "gpu",
    "": "gpu",
    "GPU": "gpu",
    "CPU_TIER1": "host",
    "CPU_TIER2": "disk",
}
"""Spellings of Dynamo's KVBM consolidator, whose events are vLLM's maps (engines/other-engines.md 5.3)."""

MAX_KEYS = 1024  # extra keys of one block
MAX_TOKENS = 1 << 31  # of a prompt
_MAX_TOKEN = (1 << 32) - 1
_MAX_GROUP = 64

_decoders = EventDecoders(msgspec.msgpack.Decoder(Event), msgspec.msgpack.Decoder(ArrayEvent))


class Source(msgspec.Struct, frozen=True):
    """What the decoder must know about who is speaking."""

    hash_bits: int = 64
    adapters: dict[str, str] = {}
    multiple_groups: bool = True  # False: one group whatever an event says (up to 0.19)
    media_places: bool = True  # False: a picture's key is its bare name, as a salt's is (0.17 and 0.18)
    lmcache: Literal["none", "in_process", "mp"] = "none"  # whose events are mixed into this stream
    lmcache_chunk: int = 256  # tokens
    consolidated: bool = False  # Dynamo's consolidator speaks for the engine

    def tier(self, medium: str | None) -> Tier:
        """Return the tier that a medium is spelled as."""
        return (DYNAMO_SPELLINGS if self.consolidated else TIER_SPELLINGS).get(medium, "other")


def decode_payload(sequence: int, payload: bytes, source: Source) -> Decoded:
    """Return what a batch says; refused events are listed beside the others.

    Raises:
        FrameError: the payload is no batch.
    """
    return decode_batch(sequence, payload, _decoders, lambda event: _conclude(event, source))


def _conclude(event: Event | ArrayEvent, source: Source) -> EngineEvent | list[EngineEvent]:
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    if source.lmcache != "none" and source.tier(event.medium) != "gpu":
        return _of_lmcache(event, source)
    if event.locality == "REMOTE":
        raise Refused(RejectReason.LOCALITY, "a block of another node")
    if isinstance(event, BlockRemoved):
        return Removed(
            hashes=read_hashes(event.block_hashes, source.hash_bits),
            tier=source.tier(event.medium),
            group=_group(event.group_idx, source),
        )
    if not source.media_places and event.token_ids:
        return _stored_beside_pictures(event, source)
    return _stored(event, source)


def _stored_beside_pictures(event: BlockStored, source: Source) -> list[EngineEvent]:
    """Return the blocks before the first picture as they are, and the others as ones that no prompt can name.

    0.17 and 0.18 publish a picture's identifier alone, so where in the block it begins is not known; a text in a
    prompt's first block may be its salt, and is taken for one (v1/core/kv_cache_utils.py _gen_mm_extra_hash_keys).
    """
    before = _blocks_before_pictures(event)
    if before == len(event.block_hashes):
        return [_stored(event, source)]
    check_tokens(event.token_ids, event.block_size, len(event.block_hashes), _MAX_TOKEN, masked=False)
    plain = msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[:before],
        token_ids=event.token_ids[: before * event.block_size],
        extra_keys=(event.extra_keys or [])[:before],
    )
    hidden = Stored(
        hashes=read_hashes(event.block_hashes[before:], source.hash_bits),
        block_size=event.block_size,
        tier=source.tier(event.medium),
        group=_group(event.group_idx, source),
        namespace_known=False,
    )
    return [_stored(plain, source), hidden] if before else [hidden]


def _blocks_before_pictures(event: BlockStored) -> int:
    """Return how many of the event's blocks have no key but the adapter's name and, at a prompt's start, one more."""
    for position, keys in enumerate(event.extra_keys or []):
        texts = [key for key in keys or [] if isinstance(key, str)]
        expected = (event.lora_name is not None) + (not position and event.parent_block_hash is None)
        if len(texts) > expected:
            return position
    return len(event.block_hashes)


def _stored(event: BlockStored, source: Source) -> Stored:
    hashes = read_hashes(event.block_hashes, source.hash_bits)
    group = _group(event.group_idx, source)
    tier = source.tier(event.medium)
    if not event.token_ids:
        return Stored(hashes=hashes, tier=tier, group=group, names_chunks=True)
    check_tokens(event.token_ids, event.block_size, len(hashes), _MAX_TOKEN, masked=True)
    if tier != "gpu" and event.extra_keys is None:
        # connectors leave salt and media out (engines/vllm-events.md 4.6), so only device events place a block
        spec = _group_spec(event, group)
        return Stored(hashes=hashes, block_size=event.block_size, tier=tier, group=group, group_spec=spec)
    adapter, known = _adapter(event, source)
    salt, media = _extra_keys(event, adapter)
    parent = event.parent_block_hash
    return Stored(
        hashes=hashes,
        parent=None if parent is None else read_hash(parent, source.hash_bits, "parent_block_hash"),
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


def _of_lmcache(event: BlockStored | BlockRemoved, source: Source) -> EngineEvent:
    """Return a store of LMCache inside the engine: whole chunks, stores only (engines/other-engines.md 3.1).

    Its medium may name the token tensor's device; parent 0 is unknown; a store says nothing of salts or media, so it
    is placed only where the engine's own events have placed these tokens. With the multiprocess server attached the
    same memory is announced there.
    """
    if source.lmcache == "mp" or isinstance(event, BlockRemoved):
        raise Refused(RejectReason.OTHER_SOURCE, f"medium {event.medium!r} of LMCache ({source.lmcache})")
    if event.block_size != source.lmcache_chunk:
        raise Refused(RejectReason.BLOCK_SIZE, f"block_size: {event.block_size}, chunks are {source.lmcache_chunk}")
    hashes = read_hashes(event.block_hashes, 64)
    check_tokens(event.token_ids, event.block_size, len(hashes), _MAX_TOKEN, masked=False)
    adapter, known = _adapter(event, source)
    return Stored(
        hashes=hashes,
        tokens=event.token_ids,
        block_size=event.block_size,
        tier="host",
        adapter=adapter,
        namespace_known=known,
        parent_known=event.parent_block_hash is None,
        names_chunks=True,
        only_known=True,
    )


def _group(index: int | None, source: Source) -> int:
    if index is None or not source.multiple_groups:
        return 0
    if not 0 <= index < _MAX_GROUP:
        raise Refused(RejectReason.GROUP, f"group_idx: {index}")
    return index


def _group_spec(event: BlockStored, group: int) -> Group | None:
    """Return what the event says of its group (0.22 and newer); a kind that has no rule here is refused."""
    if not event.kv_cache_spec_kind:
        return None
    kind = SPEC_KINDS.get(event.kv_cache_spec_kind)
    if kind is None:
        raise Refused(RejectReason.GROUP_KIND, f"kv_cache_spec_kind: {event.kv_cache_spec_kind!r:.80}")
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
        raise Refused(
            RejectReason.EXTRA_KEYS, f"extra_keys: {len(event.extra_keys)} for {len(event.block_hashes)} blocks"
        )
    salt: str | None = None
    media: list[tuple[MediaKey, ...]] = []
    for position, keys in enumerate(event.extra_keys):
        texts, block_media = _sort_keys(keys or [], position)
        if adapter is not None and texts and texts[0] == adapter:
            texts = texts[1:]
        if len(texts) > 1 or (texts and (position or event.parent_block_hash is not None)):
            raise Refused(RejectReason.EXTRA_KEYS, f"extra_keys[{position}]: a text that is neither adapter nor salt")
        if texts:
            salt = texts[0]
        media.append(block_media)
    return salt, tuple(media) if any(media) else ()


def _sort_keys(keys: list[Any], block: int) -> tuple[list[str], tuple[MediaKey, ...]]:
    if len(keys) > MAX_KEYS:
        raise Refused(RejectReason.LIMIT, f"extra_keys[{block}]: {len(keys)} keys, at most {MAX_KEYS}")
    texts: list[str] = []
    media: list[MediaKey] = []
    for key in keys:
        match key:
            case str():
                texts.append(key)
            case [str() as identifier, int() as offset] if abs(offset) <= MAX_TOKENS:
                media.append(MediaKey(identifier, offset))
            case bytes():
                media.append(MediaKey(f"embeds:{key.hex()}", 0))
            case _:
                raise Refused(RejectReason.EXTRA_KEYS, f"extra_keys[{block}]: a {type(key).__name__}")
    return texts, tuple(media)
