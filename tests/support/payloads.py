"""Messages of vLLM and SGLang in what they have in common: batches, and events of both encodings."""

import msgspec

from relays.engine_events import Stored

TIME_S = 1700000000.5
TOP = (1 << 64) - 5  # the same 64 bits as -5


def pack(value: object) -> bytes:
    """Return the value as msgpack."""
    return msgspec.msgpack.encode(value)


def batch(*events: object, rank: int | None = 0) -> list[object]:
    """Return a batch as all versions send it."""
    return [TIME_S, list(events), rank]


def array_stored(
    hashes: object = (11,), parent: object = None, tokens: object = (1, 2, 3, 4), size: object = 4, *tail: object
) -> list[object]:
    """Return a positional store up to `block_size`; `tail` begins with `lora_id`."""
    return ["BlockStored", hashes, parent, tokens, size, *tail]


def map_removed(**fields: object) -> dict[str, object]:
    """Return a removal as a map."""
    return {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", **fields}


def expected(**fields: object) -> Stored:
    """Return the store that `array_stored` and `map_stored` describe, with fields changed."""
    plain: dict[str, object] = {"hashes": (11,), "tokens": [1, 2, 3, 4], "block_size": 4}
    return Stored(**{**plain, **fields})  # type: ignore[arg-type]  # the fields are Stored's
