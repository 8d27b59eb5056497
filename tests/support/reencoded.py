"""Recordings as another version of the same engine would have sent them: fields, encodings and framings re-made.

Source: `distributed/kv_events.py` and `v1/core/kv_cache_utils.py` of vLLM 0.11 to 0.32 (engines/vllm-events.md 1.3, 1.4
and 4.6), engines/other-engines.md 1.1 to 1.3 (SGLang).
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ops.check.expected import wire_of
from ops.replay.capture import Capture, Frame
from ops.replay.vllm_meta import settings_of
from relays.dialects import parse_version

Fields = dict[str, Any]
Version = tuple[int, ...]
Tables = Mapping[str, Mapping[str, Version]]
"""Event -> field -> the version that brought it, in the order of the positional form."""


def as_version(capture: Capture, version: str) -> Capture:
    """Return the recording as that version would have sent it; what its engine did is taken to be the same."""
    number = parse_version(version)
    wire = wire_of(capture.engine, version)
    assert wire is not None
    tables: Tables = {"AllBlocksCleared": {}, **wire.fields}
    if capture.engine == "vllm":
        chunk = settings_of(capture).blocks_per_chunk

        def encode(name: str, event: Fields) -> object:
            return _vllm_event(name, event, tables[name], number, chunk)
    else:

        def encode(name: str, event: Fields) -> object:
            return _sglang_event(name, event, tables[name], number)

    frames = tuple(_frame(frame, tables, encode, wire.replay_parts == 4) for frame in capture.frames)
    return msgspec.structs.replace(capture, version=version, frames=frames)


def _frame(
    frame: Frame,
    tables: Tables,
    encode: Callable[[str, Fields], object],
    topic_in_replay: bool,
) -> Frame:
    parts = list(frame.parts)
    if frame.source.startswith("replay") and not parts[0]:
        if topic_in_replay and len(parts) == 3:
            parts.insert(1, b"")
        elif not topic_in_replay and len(parts) == 4:
            del parts[1]
    if parts[-1]:
        stamp, events, rank = msgspec.msgpack.decode(parts[-1])
        changed = [encode(*_named(event, tables)) for event in events]
        parts[-1] = msgspec.msgpack.encode([stamp, changed, rank])
    return msgspec.structs.replace(frame, parts=tuple(parts))


def _named(event: Any, tables: Tables) -> tuple[str, Fields]:
    """Return an event's name and its fields by name, whichever way it was sent."""
    if isinstance(event, dict):
        return event["type"], {key: value for key, value in event.items() if key != "type"}
    name, *values = event
    fields = dict(zip(tables[name], values, strict=False))
    if isinstance(fields.get("cache_salt"), dict):  # SGLang 0.5.18 and 0.5.19
        fields |= fields["cache_salt"]
    return name, fields


def _vllm_event(name: str, event: Fields, table: Mapping[str, Version], number: Version, chunk: int) -> object:
    if name == "BlockStored":
        event = _with_keys_of(event, number)
    if event.get("medium") == "CPU" and number < (0, 24):
        event = _as_placeholder(event, chunk)
    known = [key for key, since in table.items() if since <= number]
    if number < (0, 24):
        return [name, *(event.get(key) for key in known)]
    # what has no default is there, nil or not
    return {"type": name} | {key: event.get(key) for key in known if table[key] < (0, 17) or event.get(key) is not None}


def _with_keys_of(event: Fields, number: Version) -> Fields:
    """Return the store with a picture's identifier alone up to 0.18, and an adapter's id where there was a name."""
    keys = event.get("extra_keys")
    if keys and number < (0, 19):
        bare = [[key[0] if isinstance(key, list) else key for key in block] if block else None for block in keys]
        event = {**event, "extra_keys": bare}
    return event


def _as_placeholder(event: Fields, chunk: int) -> Fields:
    """Return a host event as OffloadingConnector sent it up to 0.23: raw names of chunks, and nothing else."""
    last = event["block_hashes"][chunk - 1 :: chunk]  # a chunk's name is its last block's
    names = [bytes(24) + h.to_bytes(8, "big") if isinstance(h, int) else h for h in last]
    return {"block_hashes": names, "token_ids": [], "block_size": 0, "medium": "CPU"}


def _sglang_event(name: str, event: Fields, table: Mapping[str, Version], number: Version) -> object:
    known = [key for key, since in table.items() if since <= number]
    if number < (0, 5, 23):  # 0.5.22 names adapters in its `dynamo` format alone
        known = [key for key in known if key != "lora_name"]
    if number >= (0, 5, 20):
        always = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
        return {"type": name} | {key: event.get(key) for key in known if (key in always) or event.get(key) is not None}
    values = [event.get(key) for key in known if key != "cache_salt"]
    if number < (0, 5, 17):
        while len(values) > 5 - 4 * (name != "BlockStored") and values[-1] is None:
            values.pop()
    elif number >= (0, 5, 18) and event.get("cache_salt") is not None and event.get("parent_block_hash") is None:
        values.append({"cache_salt": event["cache_salt"]})
    return [name, *values]
