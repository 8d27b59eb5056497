"""What stores that name blocks by engine hash alone have in common: Mooncake's master and llm-d's file store; pure.

Their events carry neither tokens nor parents; where a block stands is learnt from the replicas that read the pool
(relays/pools/pool.py, learn).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from relays.batches import read_each
from relays.engine_events import EngineEvent, Reject

RawEvent = TypeVar("RawEvent")


class StoreMessage(msgspec.Struct, frozen=True):
    """What one message of a store says, for each model in it, by the store's own name of the model."""

    time_s: float
    events: Mapping[str, tuple[EngineEvent, ...]]
    rejects: tuple[Reject, ...] = ()


def conclude(
    time_s: float, raw_events: Iterable[RawEvent], read: Callable[[RawEvent], tuple[str, EngineEvent]]
) -> StoreMessage:
    """Return what a batch's events say, those that `read` refuses listed beside the others.

    Args:
        read: returns the store's name of the model, and the event.
    """
    read_events, rejects = read_each(raw_events, read)
    events: defaultdict[str, list[EngineEvent]] = defaultdict(list)
    for model, event in read_events:
        events[model].append(event)
    return StoreMessage(time_s, {model: tuple(part) for model, part in events.items()}, rejects)
