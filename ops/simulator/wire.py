"""A batch of events as each version of vLLM writes it; pure.

Written apart from the structs' own encoding, which leaves out fields that vLLM always sends (schemas.vllm only reads).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ops.simulator.dialect import Dialect
from schemas.vllm import AllBlocksCleared, BlockStored, Event

_REMOVED_REQUIRED = 2
_encode = msgspec.msgpack.Encoder().encode


def encode_batch(time_s: float, events: Sequence[Event], rank: int, dialect: Dialect) -> bytes:
    """Return the payload `[ts, events, data_parallel_rank]`."""
    return _encode([time_s, [_event(event, dialect) for event in events], rank])


def _event(event: Event, dialect: Dialect) -> list[Any] | dict[str, Any]:
    tag = event.__struct_config__.tag
    if isinstance(event, AllBlocksCleared):
        fields: list[tuple[str, Any]] = []
    elif isinstance(event, BlockStored):
        fields = _fields(event, dialect.stored_fields, dialect.stored_required)
    else:
        fields = _fields(event, dialect.removed_fields, _REMOVED_REQUIRED)
    if dialect.event_maps:
        return {"type": tag, **dict(fields)}
    return [tag, *(value for _, value in fields)]


def _fields(event: Event, count: int, required: int) -> list[tuple[str, Any]]:
    """Return the first `count` fields; optional ones at the end are left out where they are None.

    With one full-attention group no optional field that is None stands before one that is not, so the same rule
    serves maps, which leave out any, and arrays, which leave out a tail.
    """
    fields = [(name, getattr(event, name)) for name in event.__struct_fields__[:count]]
    while len(fields) > required and fields[-1][1] is None:
        fields.pop()
    return fields
