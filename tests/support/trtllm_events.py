"""TensorRT-LLM's events in few words: blocks of four tokens, named as the V1 manager names them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from relays.dialects import EngineSettings, trtllm_profile
from relays.engine_events import EngineEvent
from relays.trtllm import Source, decode_event
from relays.trtllm_hashes import v1_names
from schemas.profiles import Profile

SIZE = 4
SOURCE = Source(block_size=SIZE)


def known(**settings: Any) -> Profile:
    """Return the profile of replica `r` of model `m`, blocks of four tokens."""
    return trtllm_profile("m", "r", "1.2.0", EngineSettings(**{"block_size": SIZE, **settings}))


def block(name: int | str, tokens: Sequence[int | str], **fields: Any) -> dict[str, Any]:
    """Return a stored block."""
    told = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": name, "tokens": told, "cache_level": 0, "priority": 35, **fields}


def blocks(tokens: Sequence[int], parent: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Return the blocks of a chain, the last of them perhaps partial."""
    cuts = [*range(0, len(tokens), SIZE), len(tokens)]
    chain: list[dict[str, Any]] = []
    for start, stop in pairwise(cuts):
        part = tokens[start:stop]
        (parent,) = v1_names(part, len(part), parent)
        chain.append(block(parent, part, **fields))
    return chain


def stored(chain: list[dict[str, Any]], parent: int | str | None = None) -> dict[str, Any]:
    """Return the data of a stored event."""
    return {"type": "stored", "parent_hash": parent, "blocks": chain}


def removed(*names: int | str) -> dict[str, Any]:
    """Return the data of a removed event."""
    return {"type": "removed", "block_hashes": list(names)}


def moved(name: int | str, before: int, after: int) -> dict[str, Any]:
    """Return the data of an updated event that moves a block to another level."""
    diff = {"type": "event_diff", "old_value": before, "new_value": after}
    return {"type": "updated", "block_hash": name, "cache_level": diff, "priority": None}


def created(*counts: int) -> dict[str, Any]:
    """Return the data of a created event."""
    return {"type": "created", "num_blocks_per_cache_level": list(counts or (400, 100))}


def event(data: dict[str, Any], number: int = 0, window: int | None = 4096, **fields: Any) -> dict[str, Any]:
    """Return an event of a drained list."""
    windows = {} if window is None else {"window_size": window}
    return {"event_id": number, "data": data, **windows, **fields}


def concluded(data: dict[str, Any], source: Source = SOURCE, **fields: Any) -> list[EngineEvent]:
    """Return what the decoder concludes from one event; it must not refuse it."""
    decoded = decode_event(0, msgspec.json.encode(event(data, **fields)), source)
    assert not decoded.rejects, decoded.rejects
    return list(decoded.events)


def body(events: Iterable[dict[str, Any]]) -> bytes:
    """Return what the server answers."""
    return msgspec.json.encode(list(events))
