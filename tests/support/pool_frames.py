"""What llm-d's publishers and Mooncake's master send, in few words; shapes as in schemas/llmd.py and mooncake.py."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

TIME_S = 1700000000.5


def file_message(
    model: str, *events: tuple[str, Sequence[int]], medium: str = "SHARED_STORAGE", sequence: int = 1
) -> list[bytes]:
    """Return a message of an llm-d publisher; each event is (`stored` or `removed`, names)."""
    packed = [msgspec.msgpack.encode(_file_event(kind, list(names), medium)) for kind, names in events]
    return frames(f"kv@{medium}@{model}".encode(), sequence, msgspec.msgpack.encode([TIME_S, packed]))


def object_message(*events: dict[str, Any], sequence: int = 1) -> list[bytes]:
    """Return a message of Mooncake's master."""
    return frames(b"", sequence, msgspec.msgpack.encode([int(TIME_S * 1000), list(events), 0]))


def object_event(kind: str, key: str, medium: str = "cpu", number: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return what the master says of one object.

    Args:
        kind: `stored` or `removed`.
        number: the key's, where it is one.
    """
    alias = {"stored": "BlockStored", "removed": "BlockRemoved"}.get(kind, kind)
    signed = None if number is None else number - (1 << 64) if number >> 63 else number
    event = {
        "event_id": 1,
        "timestamp": int(TIME_S * 1000),
        "event_type": kind,
        "type": alias,
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "store-node-0",
        "group_id": None,
        "medium": medium,
        "dp_rank": None,
        "object_key": key,
        "seq_hashes": [] if number is None else [number],
        "block_hashes": [] if signed is None else [signed],
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
        "parent_block_hash": None,
    }
    return {**event, **fields}


def frames(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Return the three parts of a message."""
    return [topic, sequence.to_bytes(8, "big"), payload]


def keys_of(model: str, names: Iterable[int], shards: Iterable[int], style: str = "long") -> list[str]:
    """Return the objects' keys of blocks, one for each of these tensor-parallel ranks.

    Args:
        style: `long` as vLLM's connector makes them, `prefixed` with a deployment's prefix, or `short`.
    """
    forms = {
        "long": "{model}@tp_rank:{shard}@pcp0@dcp0@pp_rank:0@group:0@{name:064x}",
        "prefixed": "blue@{model}@tp_rank:{shard}@pcp0@dcp0@pp_rank:0@group:0@{name:064x}",
        "older": "{model}@tp_rank:{shard}@pcp0@dcp0@pp_rank:0@{name:064x}",
        "short": "{model}@tp{shard}@{name:016x}",
    }
    shards = list(shards)
    return [forms[style].format(model=model, shard=shard, name=name) for name in names for shard in shards]


def _file_event(kind: str, names: list[int], medium: str) -> list[Any]:
    if kind == "stored":
        return ["BlockStored", names, 0, [], 0, None, medium]
    return ["BlockRemoved", names, medium]
