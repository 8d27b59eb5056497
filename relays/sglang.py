"""Decoder of SGLang's KV events, 0.5.6 to 0.5.23: payloads in, engine events out; pure."""

from typing import Any

import msgspec

from relays.batches import EventDecoders, Refused, check_tokens, decode_batch, read_hashes
from relays.engine_events import Cleared, Decoded, EngineEvent, RejectReason, Removed, Stored, normalize_hash
from schemas.profiles import Tier
from schemas.sglang import (
    AllBlocksCleared,
    ArrayEvent,
    BlockRemoved,
    BlockStored,
    BlockStoredArray,
    Event,
)

TIER_SPELLINGS: dict[str | None, Tier] = {
    None: "gpu",
    "": "gpu",
    "GPU": "gpu",
    "CPU_PINNED": "host",
    "DISK": "disk",  # defined since 0.5.11, emitted by no tree so far
    "EXTERNAL": "pool",
}
"""Spellings of the tier in SGLang's events (engines/other-engines.md 1.3); any other is `other`."""

_MAX_TOKEN = (1 << 63) - 1  # image sentinels of 0.5.23 have 62 bits (engines/other-engines.md 1.6)

_decoders = EventDecoders(msgspec.msgpack.Decoder(Event), msgspec.msgpack.Decoder(ArrayEvent))


class Source(msgspec.Struct, frozen=True):
    """What the decoder must know about who is speaking."""

    gpu_tier: Tier = "gpu"  # `host` where a silent demotion may have moved it (HiCache up to 0.5.10)


def decode_payload(sequence: int, payload: bytes, source: Source) -> Decoded:
    """Return what a batch says; refused events are listed beside the others.

    Raises:
        FrameError: the payload is no batch.
    """
    return decode_batch(sequence, payload, _decoders, lambda event: _conclude(event, source))


def _conclude(event: Event | ArrayEvent, source: Source) -> EngineEvent:
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    tier = _tier(event.medium, source)
    hashes = read_hashes(event.block_hashes, 64)
    if isinstance(event, BlockRemoved):
        return Removed(hashes=hashes, tier=tier)
    tokens, pairs = unfold_pairs(event.token_ids, event.block_size)
    check_tokens(tokens[:-1] if pairs else tokens, event.block_size, len(hashes), _MAX_TOKEN, masked=False)
    if pairs and not 0 <= tokens[-1] <= _MAX_TOKEN:
        raise Refused(RejectReason.TOKEN_RANGE, f"token_ids: outside 0..{_MAX_TOKEN}")
    salt, adapter = _namespace(event)
    parent = event.parent_block_hash
    return Stored(
        hashes=hashes,
        parent=None if parent is None else normalize_hash(parent, 64),
        tokens=tokens,
        block_size=event.block_size,
        tier=tier,
        adapter=adapter,
        salt=salt,
        pairs=pairs,
    )


def unfold_pairs(items: list[int | tuple[int, int]], block_size: int) -> tuple[list[int], bool]:
    """Return single tokens, and whether they came as EAGLE's pairs: the first of every pair, and the last's second.

    Detected by shape, not by model name (engines/other-engines.md 1.5): neighbouring pairs share a token.
    """
    if not items or not isinstance(items[0], tuple):
        if any(isinstance(item, tuple) for item in items):
            raise Refused(RejectReason.TOKEN_COUNT, "token_ids: tokens and pairs in one event")
        return items, False  # type: ignore[return-value]  # all are integers
    tokens: list[int] = []
    previous: Any = None
    for position, item in enumerate(items):
        if not isinstance(item, tuple):
            raise Refused(RejectReason.TOKEN_COUNT, "token_ids: tokens and pairs in one event")
        if previous is not None and item[0] != previous:
            raise Refused(
                RejectReason.TOKEN_COUNT, f"token_ids[{position}]: a pair that does not follow the one before"
            )
        tokens.append(item[0])
        previous = item[1]
    return [*tokens, previous], True


def _tier(medium: str | None, source: Source) -> Tier:
    tier = TIER_SPELLINGS.get(medium, "other")
    return source.gpu_tier if tier == "gpu" else tier


def _namespace(event: BlockStored | BlockStoredArray) -> tuple[str | None, str | None]:
    """Return (salt, adapter); positional events of 0.5.18 and 0.5.19 carry a map in item 7."""
    if isinstance(event, BlockStored):
        return event.cache_salt, event.lora_name
    if event.namespace is None:
        return None, None
    salt = event.namespace.get("cache_salt")
    if not isinstance(salt, str) or set(event.namespace) - {"cache_salt"}:
        raise Refused(RejectReason.EXTRA_KEYS, "a namespace that is not {cache_salt}")
    return salt, None
