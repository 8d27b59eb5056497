"""A batch of events as each version of SGLang writes it; pure.

Source: disaggregation/kv_events.py of the wheels named in dialect.py; engines/other-engines.md 1.2.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ops.simulator.sglang.dialect import Dialect
from schemas.sglang import AllBlocksCleared, BlockStored, Event

_encode = msgspec.msgpack.Encoder().encode


def encode_batch(time_s: float, events: Sequence[Event], rank: int, dialect: Dialect) -> bytes:
    """Return the payload `[ts, events, attn_dp_rank]`."""
    write = _map if dialect.event_maps else _array
    return _encode([time_s, [write(event, dialect) for event in events], rank])


def _map(event: Event, dialect: Dialect) -> dict[str, Any]:
    tag = event.__struct_config__.tag
    if isinstance(event, AllBlocksCleared):
        return {"type": tag}
    always = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"}
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return {"type": tag, **{name: value for name, value in fields.items() if value is not None or name in always}}


def _array(event: Event, dialect: Dialect) -> list[Any]:
    tag = event.__struct_config__.tag
    if isinstance(event, AllBlocksCleared):
        return [tag]
    medium = [event.medium] if dialect.medium and not (dialect.cut_defaults and event.medium is None) else []
    if not isinstance(event, BlockStored):
        return [tag, event.block_hashes, *medium]
    # a salted store has a map at its end: a struct of its own, which leaves plain stores as long as they were
    salt = [] if event.cache_salt is None else [{"cache_salt": event.cache_salt}]
    head = [event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id]
    return [tag, *head, *medium, *salt]
