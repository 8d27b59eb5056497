"""Messages of Mooncake's master: what it publishes, and (a wire of our own) how the simulated one is asked; pure.

Source of events: engines/other-engines.md 4.1. A key that vLLM's connector makes is no number, so hashes stay empty.
Source of keys: vLLM distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py (PoolKey).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from ops.simulator.mooncake.master import Changed
from schemas.errors import BadRequest

BATCH_EVENTS = 64  # of one message at most
_ALIASES = {"stored": "BlockStored", "removed": "BlockRemoved"}
_encode = msgspec.msgpack.Encoder().encode

Verb = Literal["exist", "put"]


class Question(msgspec.Struct, array_like=True, frozen=True):
    """What the simulated master is asked: which objects exist, or to keep them. The answer has a byte a key, 1 or 0."""

    verb: Verb
    keys: list[str]


_questions = msgspec.msgpack.Decoder(Question)


def encode_question(verb: Verb, keys: Sequence[str]) -> bytes:
    """Return the question."""
    return _encode(Question(verb, list(keys)))


def decode_question(body: bytes) -> Question:
    """Return the question.

    Raises:
        BadRequest: it is none.
    """
    try:
        return _questions.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"question: {error}") from error


def object_key(model: str, block_hash: bytes) -> str:
    """Return the key of a block of a model that runs on one device."""
    return f"{model}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{block_hash.hex()}"


def encode_batches(changes: Sequence[Changed], backend: str, first_id: int, time_ms: int) -> Iterator[bytes]:
    """Yield the payloads `[ts, events, 0]` that tell of these changes; event ids count from `first_id`."""
    events = [_event(change, backend, first_id + number, time_ms) for number, change in enumerate(changes)]
    for at in range(0, len(events), BATCH_EVENTS):
        yield _encode([time_ms, events[at : at + BATCH_EVENTS], 0])


def _event(change: Changed, backend: str, event_id: int, time_ms: int) -> dict[str, Any]:
    return {
        "event_id": event_id,
        "timestamp": time_ms,
        "event_type": change.kind,
        "type": _ALIASES[change.kind],
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": backend,
        "group_id": None,
        "medium": "cpu",
        "dp_rank": None,
        "object_key": change.key,
        "seq_hashes": [],
        "block_hashes": [],
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
        "parent_block_hash": None,
    }
