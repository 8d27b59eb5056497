"""Decoder of llm-d's filesystem offload publisher: one message in, what it says of its model out; pure.

Source: engines/other-engines.md 7.2.
"""

import msgspec

from relays.batches import read_hashes, read_payload, read_struct
from relays.engine_events import EngineEvent, Removed, Stored
from relays.stores import StoreMessage, conclude
from schemas.errors import FrameError
from schemas.llmd import FileBatch, FileEvent, FileRemoved
from schemas.profiles import Tier

TIERS: dict[str, Tier] = {"SHARED_STORAGE": "disk", "OBJECT_STORE": "disk"}
"""By the medium in the topic; neither says whether anything keeps it in memory."""

_batches = msgspec.msgpack.Decoder(FileBatch)
_events = msgspec.msgpack.Decoder(FileEvent)


def decode_llmd(topic: bytes, payload: bytes) -> StoreMessage:
    """Return what a message of llm-d's publisher says; model and medium stand in its topic.

    Raises:
        FrameError: topic or payload is of another form.
    """
    parts = topic.decode(errors="replace").split("@", 2)
    if len(parts) != 3 or parts[0] != "kv" or parts[1] not in TIERS:
        raise FrameError("topic", f"{topic[:80]!r}: expected kv@SHARED_STORAGE@model or kv@OBJECT_STORE@model")
    tier, model = TIERS[parts[1]], parts[2]
    batch = read_payload(payload, _batches.decode, lambda batch: batch.events)
    return conclude(batch.ts, batch.events, lambda packed: (model, _file(packed, tier)))


def _file(packed: bytes, tier: Tier) -> EngineEvent:
    event = read_struct(_events, packed)
    hashes = read_hashes(event.block_hashes, 64)
    if isinstance(event, FileRemoved):
        return Removed(hashes=hashes, tier=tier, names_chunks=True)
    return Stored(hashes=hashes, tier=tier, names_chunks=True)
