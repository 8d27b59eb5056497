"""TensorRT-LLM's KV event wire formats: the JSON of `POST /kv_cache_events`, and the ZMQ maps of its V2 manager.

Source: engines/other-engines.md 2.1, 2.2 and 2.4; KVCacheEventSerializer of tensorrt_llm/_utils.py, and
tensorrt_llm/_torch/pyexecutor/kv_cache_events.py @13599e98. A body is a list of objects; keys that are not listed here
are ignored. Integers are exact up to 64 bits: hashes go above 2^53.
"""

from typing import Any

import msgspec


class UniqueToken(msgspec.Struct, gc=False):
    """One token of a block."""

    token_id: int | str  # a text is the digest of a multimodal item (V2), as 64 hex digits
    token_extra_id: int = 0  # prompt tuning; 0: none


class MmKey(msgspec.Struct, gc=False):
    """A multimodal item that a block overlaps; where in the block it begins is not said."""

    hash: str  # content hash as hex digits, or (V1) the caller's own id
    start_offset: int = 0  # of the block's first token of the item, counted from the item's first
    uuid: str | None = None  # V2


class StoredBlock(msgspec.Struct):
    """A block of a stored chain; one with fewer than tokens_per_block tokens is announced like a full one.

    | field | type | since |
    | --- | --- | --- |
    | block_hash | u64, or 64 hex digits | the beginning; hex only with hash_algo v2_sha256 |
    | tokens | list of unique_token | the beginning |
    | cache_level | 0 device, 1 host, 2 disk | the beginning; 2 only in V2 |
    | priority | int | the beginning; says nothing of what is cached |
    | mm_keys, cache_salt | list of mm_key; str | later releases; V2 leaves both empty |
    | lora_id | int or null | no release so far (the serializer has it commented out); taken at its word |
    """

    block_hash: int | str
    tokens: list[UniqueToken]
    cache_level: int = 0
    mm_keys: list[MmKey] | None = None
    cache_salt: str | int | None = None
    lora_id: int | msgspec.UnsetType | None = msgspec.UNSET  # unset: the JSON hides the adapter


class CreatedData(msgspec.Struct, tag="created"):
    """The pools of one window were made; one event a window, at the start."""

    num_blocks_per_cache_level: list[int]  # device, host, (disk)


class StoredData(msgspec.Struct, tag="stored"):
    """A chain of blocks is cached, parent to child."""

    parent_hash: int | str | None  # of the block before the first; null: a prompt begins here
    blocks: list[StoredBlock]


class RemovedData(msgspec.Struct, tag="removed"):
    """Blocks are gone from every level; since UnifiedBlockTree (PR #11919) the blocks below them too, unlisted."""

    block_hashes: list[int | str]


class EventDiff(msgspec.Struct, gc=False):
    """What a value was and is."""

    new_value: int
    old_value: int


class UpdatedData(msgspec.Struct, tag="updated"):
    """A block's level or priority changed; what did not change is null, or absent."""

    block_hash: int | str
    cache_level: EventDiff | None = None
    priority: EventDiff | None = None


EventData = CreatedData | StoredData | RemovedData | UpdatedData


class EventKind(msgspec.Struct):
    """The tag of an event's data alone."""

    type: str


class EventHead(msgspec.Struct):
    """What says whose event it is and in which order; the data is read later.

    | field | type | since |
    | --- | --- | --- |
    | event_id | int | the beginning; per rank, from 0, one more each event of any window |
    | data | object with `type` | the beginning |
    | window_size | int | PR #5580; every window repeats the events of its own blocks |
    | attention_dp_rank | int | attention data parallelism only; absent is rank 0 |
    """

    event_id: int
    data: EventKind
    window_size: int | None = None
    attention_dp_rank: int | None = None


class PulledEvent(msgspec.Struct):
    """One event of a drained list.

    | field | type | since |
    | --- | --- | --- |
    | event_id, data, window_size, attention_dp_rank | see `EventHead` | |
    | hash_algo | v1_block_key, v2_sha256 or v2_sha256_64 | V2 manager; absent: v1_block_key |
    | layer_group_id | int | V2 manager |
    """

    event_id: int
    data: EventData
    attention_dp_rank: int | None = None
    hash_algo: str | None = None
    layer_group_id: int | None = None


# ---- ZMQ


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """Full blocks are cached, parent to child; a map inside a positional batch (schemas/batches.py).

    Always there: block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name. The others are
    left out at their default; extra_keys, group_idx and locality are defined and never filled.
    """

    block_hashes: list[int]  # low 64 bits of the V2 digests, signed
    parent_block_hash: int | None
    token_ids: list[int | str]  # a text is the digest of a multimodal item
    block_size: int
    lora_id: int | None = None
    medium: str | None = None  # "GPU"; moves are not announced
    lora_name: str | None = None  # always nil so far
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    locality: str | None = None
    mm_keys: list[list[MmKey]] | None = None  # one list a hash


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    """Blocks are gone; every block is listed, none is implied."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The cache of this rank was emptied; defined, produced by no release so far."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared
