"""Blocks that have no place yet: stores by the parent that they wait for, and names that came alone; pure."""

from collections import OrderedDict
from collections.abc import Iterator

from relays.engine_events import EngineHash, Stored


class _Wait:
    """One store that waits, and how many of its blocks still have a copy."""

    __slots__ = ("live", "parent", "stored", "units")

    def __init__(self, parent: EngineHash, stored: Stored, units: int) -> None:
        self.parent = parent
        self.stored = stored
        self.units = units
        self.live = len(stored.hashes)


class Waiting:
    """What waits for a place, bounded in units of stores and in names; past a bound the oldest are given up."""

    def __init__(self, most_units: int, most_names: int) -> None:
        self.units = 0
        self._most_units = most_units
        self._most_names = most_names
        self._names: OrderedDict[EngineHash, None] = OrderedDict()  # without tokens or parent, oldest first
        self._waits: OrderedDict[int, _Wait] = OrderedDict()  # oldest first, by identity
        self._by_parent: dict[EngineHash, list[_Wait]] = {}
        self._by_name: dict[EngineHash, list[_Wait]] = {}

    def add(self, parent: EngineHash, stored: Stored, units: int) -> int:
        """Let a store wait; return how many blocks were given up for it."""
        wait = _Wait(parent, stored, units)
        self._waits[id(wait)] = wait
        self._by_parent.setdefault(parent, []).append(wait)
        for name in stored.hashes:
            self._by_name.setdefault(name, []).append(wait)
        self.units += units
        given_up = 0
        while self.units > self._most_units:
            oldest = next(iter(self._waits.values()))
            given_up += len(oldest.stored.hashes)
            self._end(oldest)
        return given_up

    def take(self, parent: EngineHash) -> list[Stored]:
        """Return what waited for a parent, in the order in which it came; it waits no longer."""
        ready = self._by_parent.get(parent)
        if not ready:
            return []
        stores = [wait.stored for wait in ready]
        for wait in list(ready):
            self._end(wait)
        return stores

    @property
    def names(self) -> int:
        """Names that wait alone."""
        return len(self._names)

    def hold(self, name: EngineHash) -> EngineHash | None:
        """Let a name wait alone; return the one that is given up for it."""
        self._names[name] = None
        return self._names.popitem(last=False)[0] if len(self._names) > self._most_names else None

    def placed(self, name: EngineHash) -> None:
        """End the wait of a name that has its place now."""
        self._names.pop(name, None)

    def forget(self, name: EngineHash) -> None:
        """End the wait of a block that has no copy left; its store goes once all of its blocks are gone."""
        self._names.pop(name, None)
        for wait in list(self._by_name.pop(name, ())):
            wait.live -= 1
            if wait.live <= 0:
                self._end(wait)

    def __iter__(self) -> Iterator[Stored]:
        """Yield what waits, oldest first."""
        return (wait.stored for wait in self._waits.values())

    def _end(self, wait: _Wait) -> None:
        del self._waits[id(wait)]
        self.units -= wait.units
        _take_out(self._by_parent, wait.parent, wait)
        for name in wait.stored.hashes:
            _take_out(self._by_name, name, wait)


def _take_out(table: dict[EngineHash, list[_Wait]], key: EngineHash, wait: _Wait) -> None:
    waits = table.get(key)
    if waits is None:
        return
    waits[:] = [other for other in waits if other is not wait]
    if not waits:
        del table[key]
