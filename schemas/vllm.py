"""vLLM's KV event wire format, 0.11 to 0.32: arrays up to 0.23, maps from 0.24.

Source: `distributed/kv_events.py` of the releases named in the tables, and recorded frames of 0.12.0 to 0.32.0.
A message has three parts: topic, sequence (8 bytes, unsigned, big-endian, from 0), payload.
A payload is a batch `[ts, events, data_parallel_rank]`; events are tagged arrays or maps with key `type`.
"""

from typing import Any

import msgspec

EngineHash = int | bytes


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """Blocks of one request and group became full.

    | position | field | since |
    | --- | --- | --- |
    | 1-5 | block_hashes, parent_block_hash, token_ids, block_size, lora_id | 0.11 |
    | 6 | medium | 0.11 |
    | 7 | lora_name | 0.14 |
    | 8 | extra_keys | 0.17 |
    | 9 | group_idx | 0.20 |
    | 10, 11 | kv_cache_spec_kind, kv_cache_spec_sliding_window | 0.22 |
    | 12 | locality | 0.26 |
    | 13 | ownership | 0.29 |
    | 14 | session_id | 0.30 |

    Position 0 is the tag. A missing tail holds defaults, a longer one is ignored.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # one per block hash
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """Copies of blocks were evicted: one event a physical copy (0.32: one hash an event)."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """A cache was reset; the event says neither which tier nor which group."""


class BlockStoredArray(BlockStored, array_like=True, tag="BlockStored"):
    """The positional form of `BlockStored`."""


class BlockRemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """The positional form of `BlockRemoved`."""


class AllBlocksClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """The positional form of `AllBlocksCleared`."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
ArrayEvent = BlockStoredArray | BlockRemovedArray | AllBlocksClearedArray


SPEC_KINDS: dict[str, str] = {
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "mamba": "state",
}
"""`kv_cache_spec_kind` values and our group kinds.

Source: v1/kv_cache_interface.py KVCacheSpecKind, 0.32.0. The others (chunked local, encoder-only, cross attention,
unknown) have no rule here: their groups earn nothing, and what the others reach is an upper bound.
"""
