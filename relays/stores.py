"""What stores that name blocks by engine hash alone have in common: Mooncake's master and llm-d's file store; pure.

Their events carry neither tokens nor parents; where a block stands is learnt from the replicas that read the pool
(relays/pools/pool.py, learn).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from relays.batches import BROKEN, MAX_EVENTS, MAX_PAYLOAD_BYTES, Refused, first_line
from relays.engine_events import EngineEvent, Reject
from schemas.errors import FrameError
from schemas.llmd import FileBatch
from schemas.mooncake import ObjectBatch

AnyBatch = TypeVar("AnyBatch", ObjectBatch, FileBatch)
RawEvent = TypeVar("RawEvent")


class StoreMessage(msgspec.Struct, frozen=True):
    """What one message of a store says, for each model in it, by the store's own name of the model."""

    time_s: float
    events: Mapping[str, tuple[EngineEvent, ...]]
    rejects: tuple[Reject, ...] = ()


def read_batch(decoder: "msgspec.msgpack.Decoder[AnyBatch]", payload: bytes) -> AnyBatch:
    """Return a payload's batch, its events still encoded.

    Raises:
        FrameError: it is none, or too large.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError("payload_bytes", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}")
    try:
        batch = decoder.decode(payload)
    except BROKEN as error:
        raise FrameError("batch_malformed", first_line(error)) from error
    if len(batch.events) > MAX_EVENTS:
        raise FrameError("event_count", f"{len(batch.events)} events, at most {MAX_EVENTS}")
    return batch


def conclude(
    time_s: float, raw_events: Iterable[RawEvent], read: Callable[[RawEvent], tuple[str, EngineEvent]]
) -> StoreMessage:
    """Return what a batch's events say, those that `read` refuses listed beside the others.

    Args:
        read: returns the store's name of the model, and the event.
    """
    events: defaultdict[str, list[EngineEvent]] = defaultdict(list)
    rejects: list[Reject] = []
    for position, raw in enumerate(raw_events):
        try:
            model, event = read(raw)
            events[model].append(event)
        except Refused as refused:
            rejects.append(Reject(refused.reason, position, refused.detail))
    return StoreMessage(time_s, {model: tuple(part) for model, part in events.items()}, tuple(rejects))
