"""Mooncake's master as far as its events show it: objects, leases, room and evictions; pure.

Source: mooncake-store/src/master_service.cpp (ExistKey, PutStart, PutEnd, EvictionThreadFunc, BatchEvict) and
include/types.h of Mooncake; engines/other-engines.md 4.1. All objects are of one size, in memory and without pins.
"""

from collections.abc import Sequence
from heapq import nsmallest
from math import ceil
from typing import Literal, NamedTuple


class Changed(NamedTuple):
    """An object came or went."""

    kind: Literal["stored", "removed"]
    key: str


class Master:
    """What is in the store."""

    def __init__(self, objects: int, lease_s: float, high_watermark: float, eviction_ratio: float) -> None:
        self._room = objects
        self._lease_s = lease_s
        self._high_watermark = high_watermark
        self._eviction_ratio = eviction_ratio
        self._leases: dict[str, float] = {}  # key -> until when it stays
        self._refused = False  # a put found no room
        self._changes: list[Changed] = []

    def __len__(self) -> int:
        """Return how many objects there are."""
        return len(self._leases)

    def exist(self, keys: Sequence[str], now_s: float) -> list[bool]:
        """Return which objects are there; those stay for the time of a lease, in which they can be read."""
        found = [key in self._leases for key in keys]
        for key, there in zip(keys, found, strict=True):
            if there:
                self._leases[key] = max(self._leases[key], now_s + self._lease_s)
        return found

    def put(self, keys: Sequence[str], now_s: float) -> list[bool]:
        """Keep objects, as far as there is room; return which are there now. A new one has no lease."""
        return [self._put(key, now_s) for key in keys]

    def evict(self, now_s: float) -> int:
        """Make room where the store is nearly full or refused an object; return how many objects went.

        Those whose lease ended longest ago go first.
        """
        used = len(self._leases) / self._room
        if used <= self._high_watermark and not self._refused:
            return 0
        share = max(self._eviction_ratio, used - self._high_watermark + self._eviction_ratio)
        ended = (key for key, until_s in self._leases.items() if until_s <= now_s)
        gone = nsmallest(ceil(len(self._leases) * share), ended, key=self._leases.__getitem__)
        for key in gone:
            del self._leases[key]
            self._changes.append(Changed("removed", key))
        if gone:
            self._refused = False
        return len(gone)

    def take_changes(self) -> list[Changed]:
        """Return what happened since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _put(self, key: str, now_s: float) -> bool:
        if key in self._leases:
            return True
        if len(self._leases) >= self._room:
            self._refused = True
            return False
        self._leases[key] = now_s
        self._changes.append(Changed("stored", key))
        return True
