"""Decoder of TensorRT-LLM's KV events: drained JSON lists and ZMQ payloads in, engine events out; pure.

A block is credited only where its tokens and its namespace are known. The JSON hides adapters, older releases hide
salts and multimodal keys too: each shows in the engine's own names (relays/trtllm_hashes.py). From the first block of
a chain that cannot be told on, nothing of that chain earns anything.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from relays.batches import (
    BROKEN,
    EventDecoders,
    Refused,
    check_tokens,
    decode_batch,
    first_line,
    read_each,
    read_payload,
    read_struct,
    reason_of,
)
from relays.engine_events import (
    Cleared,
    Decoded,
    EngineEvent,
    EngineHash,
    Moved,
    Reject,
    RejectReason,
    Removed,
    Stored,
    normalize_hash,
)
from relays.trtllm_hashes import count_named
from schemas.events import MAX_NUMBER
from schemas.profiles import Tier
from schemas.trtllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventHead,
    PulledEvent,
    RemovedData,
    StoredBlock,
    StoredData,
    UpdatedData,
    WireEvent,
)

LEVELS: tuple[Tier, ...] = ("gpu", "host", "disk")
"""Tiers of the cache levels 0, 1 and 2; any other is `other`."""

TIER_SPELLINGS: dict[str | None, Tier] = {None: "gpu", "": "gpu", "GPU": "gpu"}
"""Spellings of the tier on the ZMQ path, which names the device only; any other is `other`."""

MAX_DRAIN_BYTES = 256 << 20  # a token takes some 60 bytes of JSON
MAX_RANK = 1023  # attention data parallelism
_MAX_TOKEN = (1 << 31) - 1
_MAX_GROUP = 64
_HEX_DIGITS = 64

_drains = msgspec.json.Decoder(list[msgspec.Raw])
_heads = msgspec.json.Decoder(EventHead)
_pulled = msgspec.json.Decoder(PulledEvent)
_maps: "msgspec.msgpack.Decoder[Any]" = msgspec.msgpack.Decoder(WireEvent)
_decoders = EventDecoders(_maps, _maps)


class Source(msgspec.Struct, frozen=True):
    """What the decoder must know about who is speaking."""

    block_size: int  # tokens_per_block, which the JSON does not say, and partial blocks look like full ones; 0: a
    # chain's first block is taken for full
    adapters: dict[str, str] = {}  # lora id -> name
    check_hashes: bool = True  # False: namespaces that events hide are taken for the plain one


class Drained(NamedTuple):
    """One event of a drained list, its data still encoded."""

    rank: int
    event_id: int
    window: int | None  # tokens; None: a release that has one
    created: bool  # it tells of a pool, not of blocks
    payload: bytes


# ---- HTTP


def split_drain(body: bytes) -> tuple[list[Drained], tuple[Reject, ...]]:
    """Return the events of a drained list, each rank's in their order; one whose head cannot be read is refused.

    Raises:
        FrameError: the body is no list of events.
    """
    raws = read_payload(body, _drains.decode, lambda raws: raws, most_bytes=MAX_DRAIN_BYTES)
    return read_each(raws, _read_head)


def decode_event(sequence: int, payload: bytes, source: Source) -> Decoded:
    """Return what one event of a drained list says; the list has no clock."""
    rank: int | None = None
    try:
        event = _pulled.decode(payload)
        rank = event.attention_dp_rank or 0
        return Decoded(sequence, 0.0, rank, tuple(_conclude_pulled(event, source)))
    except Refused as refused:
        reject = Reject(refused.reason, 0, refused.detail)
    except BROKEN as error:
        reject = Reject(reason_of(error), 0, first_line(error))
    return Decoded(sequence, 0.0, rank, (), (reject,))


def _read_head(raw: msgspec.Raw) -> Drained:
    head = read_struct(_heads, raw)
    rank = head.attention_dp_rank or 0
    if not 0 <= head.event_id <= MAX_NUMBER:
        raise Refused(RejectReason.LIMIT, f"event_id: {head.event_id}")
    if not 0 <= rank <= MAX_RANK:
        raise Refused(RejectReason.LIMIT, f"attention_dp_rank: {rank}, at most {MAX_RANK}")
    return Drained(rank, head.event_id, head.window_size, head.data.type == "created", bytes(raw))


def _conclude_pulled(event: PulledEvent, source: Source) -> list[EngineEvent]:
    group = _group(event.layer_group_id)
    match event.data:
        case StoredData():
            return _stored_pulled(event.data, event.hash_algo or "v1_block_key", group, source)
        case RemovedData(names):
            return [
                Removed(hashes=tuple(_name(name, f"block_hashes[{n}]") for n, name in enumerate(names)), group=group)
            ]
        case UpdatedData(name, level) if level is not None and level.new_value != level.old_value:
            tier, before = _tier(level.new_value), _tier(level.old_value)
            return [Moved(hashes=(_name(name, "block_hash"),), before=before, tier=tier, group=group)]
    return []  # a pool was made, or a priority changed


def _stored_pulled(data: StoredData, algorithm: str, group: int, source: Source) -> list[EngineEvent]:
    size = source.block_size or (len(data.blocks[0].tokens) if data.blocks else 0)
    blocks = _whole_blocks(data.blocks, size)
    if not blocks or not size:
        return []
    told = next((n for n, block in enumerate(blocks) if not _tells_tokens(block)), len(blocks))
    tokens: list[Any] = [token.token_id for block in blocks[:told] for token in block.tokens]  # all are integers
    _check_range(tokens)
    first = blocks[0]
    parent = None if data.parent_hash is None else _name(data.parent_hash, "parent_hash")
    salt = first.cache_salt if parent is None else None
    chain = _Chain(
        names=tuple(_name(block.block_hash, f"blocks[{n}].block_hash") for n, block in enumerate(blocks)),
        tokens=tokens,
        parent=parent,
        block_size=size,
        tiers=[_tier(block.cache_level) for block in blocks],
        group=group,
        adapter_id=first.lora_id if isinstance(first.lora_id, int) else None,
        salt=salt if isinstance(salt, str) else None,
    )
    if isinstance(salt, int):
        return _split(chain, source, 0)  # a number that stands for a salt
    if first.lora_id is msgspec.UNSET:
        return _split(chain, source, _count_known(chain, algorithm, source))
    return _split(chain, source, told)


def _whole_blocks(blocks: list[StoredBlock], size: int) -> list[StoredBlock]:
    """Return the blocks without a last one that is not full: nothing can follow it, and a longer prompt misses it."""
    for position, block in enumerate(blocks):
        count = len(block.tokens)
        if count > size:
            raise Refused(RejectReason.BLOCK_SIZE, f"blocks[{position}]: {count} tokens, expected {size}")
        if count < size:
            if position < len(blocks) - 1:
                raise Refused(
                    RejectReason.TOKEN_COUNT, f"blocks[{position}]: {count} tokens of {size}, and more follow"
                )
            return blocks[:position]
    return blocks


def _tells_tokens(block: StoredBlock) -> bool:
    """Return whether a prompt's tokens alone can name this block: no media, no prompt tuning."""
    return not block.mm_keys and all(isinstance(t.token_id, int) and not t.token_extra_id for t in block.tokens)


def _tier(level: int) -> Tier:
    return LEVELS[level] if 0 <= level < len(LEVELS) else "other"


def _name(value: int | str, place: str) -> EngineHash:
    """Return a name as the mirror keeps it: 64 bits, or a digest whole."""
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise Refused(RejectReason.HASH, f"{place}: wider than 64 bits")
        return normalize_hash(value, 64)
    try:
        if len(value) == _HEX_DIGITS:
            return bytes.fromhex(value)
    except ValueError as error:
        raise Refused(RejectReason.HASH, f"{place}: no hexadecimal digits") from error
    raise Refused(RejectReason.HASH, f"{place}: {len(value)} characters, expected {_HEX_DIGITS}")


# ---- ZMQ


def decode_payload(sequence: int, payload: bytes, source: Source) -> Decoded:
    """Return what a published batch says; refused events are listed beside the others.

    Raises:
        FrameError: the payload is no batch.
    """
    return decode_batch(sequence, payload, _decoders, lambda event: _conclude(event, source))


def _conclude(event: WireEvent, source: Source) -> EngineEvent | list[EngineEvent]:
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    if event.locality == "REMOTE":
        raise Refused(RejectReason.LOCALITY, "a block of another node")
    tier, group = TIER_SPELLINGS.get(event.medium, "other"), _group(event.group_idx)
    names = tuple(_name(name, f"block_hashes[{position}]") for position, name in enumerate(event.block_hashes))
    if isinstance(event, BlockRemoved):
        return Removed(hashes=names, tier=tier, group=group)
    return _stored(event, names, tier, group, source)


def _stored(
    event: BlockStored, names: tuple[EngineHash, ...], tier: Tier, group: int, source: Source
) -> list[EngineEvent]:
    size = event.block_size
    told = next((n for n, token in enumerate(event.token_ids) if isinstance(token, str)), len(event.token_ids))
    tokens = [token if isinstance(token, int) else 0 for token in event.token_ids]
    check_tokens(tokens, size, len(names), _MAX_TOKEN, masked=False)
    keys = event.mm_keys or []
    told = min(told // size, next((n for n, key in enumerate(keys) if key), len(names)))
    chain = _Chain(
        names=names,
        tokens=tokens[: told * size],
        parent=None if event.parent_block_hash is None else _name(event.parent_block_hash, "parent_block_hash"),
        block_size=size,
        tiers=[tier] * len(names),
        group=group,
        adapter_id=event.lora_id,
        adapter=event.lora_name,
    )
    return _split(chain, source, _count_known(chain, "v2_sha256_low64", source))


# ---- both


class _Chain(msgspec.Struct, kw_only=True):
    """Blocks that follow each other, and what is told of their namespace."""

    names: tuple[EngineHash, ...]
    tokens: list[int]  # of the leading blocks whose tokens are known
    parent: EngineHash | None
    block_size: int
    tiers: Sequence[Tier]
    group: int
    adapter_id: int | None = None
    adapter: str | None = None
    salt: str | None = None


def _count_known(chain: _Chain, algorithm: str, source: Source) -> int:
    """Return how many leading blocks are certainly those of the tokens and the namespace that were told."""
    told = len(chain.tokens) // chain.block_size
    if not told or not source.check_hashes:
        return told
    return count_named(
        chain.names[:told],
        chain.tokens,
        chain.block_size,
        chain.parent,
        algorithm=algorithm,
        salt=chain.salt,
        adapter_id=chain.adapter_id,
    )


def _split(chain: _Chain, source: Source, known: int) -> list[EngineEvent]:
    """Return the chain as stores of one tier each, the blocks that are not known apart."""
    adapter = chain.adapter
    if adapter is None and chain.adapter_id is not None:
        adapter = source.adapters.get(str(chain.adapter_id))
        known = known if adapter is not None else 0
    events: list[EngineEvent] = []
    start, size = 0, chain.block_size
    for end in range(1, len(chain.names) + 1):
        if end < len(chain.names) and end != known and chain.tiers[end] == chain.tiers[start]:
            continue
        events.append(
            Stored(
                hashes=chain.names[start:end],
                parent=chain.names[start - 1] if start else chain.parent,
                tokens=chain.tokens[start * size : end * size] if start < known else (),
                block_size=size,
                tier=chain.tiers[start],
                group=chain.group,
                adapter=adapter,
                salt=chain.salt if not start else None,
                namespace_known=start < known,
            )
        )
        start = end
    return events


def _check_range(tokens: list[int]) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) > _MAX_TOKEN):
        raise Refused(RejectReason.TOKEN_RANGE, f"tokens: outside 0..{_MAX_TOKEN}")


def _group(index: int | None) -> int:
    if index is not None and not 0 <= index < _MAX_GROUP:
        raise Refused(RejectReason.GROUP, f"group: {index}")
    return index or 0
