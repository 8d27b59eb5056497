"""Counts an engine's copies of its blocks by group and tier, as its removals, ages and clears end them; pure."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator

from relays.cache.block_table import BlockTable, Entry
from relays.cache.learnt import LearntProfile, Place, place_of, tier_of
from relays.engine_events import EngineHash, Moved, Removed, Stored
from schemas.profiles import TIERS, Tier

Copy = tuple[EngineHash, Place]


class Copies:
    """The copies of one table's entries."""

    def __init__(self, table: BlockTable, learnt: LearntProfile, counts: Counter[str], now_s: float) -> None:
        self.now_s = now_s  # monotonic; the age of copies that nothing may ever remove begins here
        self.device_clears = 0
        self._table = table
        self._learnt = learnt
        self._counts = counts
        self._held: Counter[Tier] = Counter()  # (engine hash, group) pairs with copies
        self._ages: OrderedDict[Copy, float] = OrderedDict()  # when a copy was stored last, where copies age
        # the device clears before a copy, in lower tiers of known capacity
        self._stamps: dict[Tier, dict[Copy, int]] = {
            tier.name: {} for tier in learnt.profile.tiers if tier.capacity is not None and tier.name != "gpu"
        }

    @property
    def any_held(self) -> bool:
        """Whether there is a copy at all."""
        return any(self._held.values())

    def counted(self, event: Stored | Removed) -> tuple[EngineHash, ...]:
        """Return the hashes that stand for whole retrieval units: the last of each chunk (DESIGN 4.12).

        A removal may name a chunk's blocks or the chunk alone (vLLM offloading/events.py _take_removed_event); only the
        names of chunks were counted.
        """
        chunk = self._learnt.profile.tier(event.tier).chunk
        if chunk == 1 or event.names_chunks:
            return event.hashes
        last = event.hashes[chunk - 1 :: chunk]
        if isinstance(event, Stored):
            return last
        position = self._learnt.position(event.group)
        place = place_of(position if position is not None else -1, event.tier)
        entries = self._table.entries
        return tuple(name for name in event.hashes if name in entries and place in entries[name].copies) or last

    def add(self, names: Iterable[EngineHash], place: Place) -> None:
        """Count one more copy of each block."""
        tier = tier_of(place)
        ages, stamped = self._learnt.profile.ages(tier), tier in self._stamps
        again = self._learnt.profile.re_announces_hits
        for name in names:
            entry = self._table.entry_of(name)
            if entry is None:
                self._counts["limit_blocks"] += 1
                continue
            before = entry.copies.get(place, 0)
            self._held[tier] += not before
            entry.copies[place] = 1 if again else before + 1
            self._table.touch(entry)
            if ages:
                self._ages[name, place] = self.now_s
                self._ages.move_to_end((name, place))
            if stamped:
                self._stamp((name, place), tier)

    def remove(self, event: Removed) -> None:
        """Take one copy of each block away, or more where the profile's removals do so."""
        position = self._learnt.position(event.group)
        place = place_of(position if position is not None else -1, event.tier)
        names: Iterable[EngineHash] = self.counted(event)
        left = dict(zip(event.hashes, event.remaining, strict=False)) if event.remaining else {}
        for name in self._with_all_below(names) if self._learnt.profile.cascade else names:
            self._remove(name, place, left.get(name))

    def move(self, event: Moved) -> None:
        """Let copies change their tier in one step; of a copy that is not known nothing is concluded."""
        position = self._learnt.position(event.group)
        if position is None or not self._learnt.pair(position, event.tier):
            self._counts["move_unknown"] += len(event.hashes)
            return
        before, after = place_of(position, event.before), place_of(position, event.tier)
        for name in event.hashes:
            entry = self._table.entries.get(name)
            if entry is None or before not in entry.copies:
                self._counts["move_unknown"] += 1
                continue
            entry.copies[before] -= 1
            if not entry.copies[before]:
                self._drop(entry, before)
            self.add((name,), after)

    def drop_tiers(self, tiers: Collection[Tier] = TIERS) -> None:
        """Drop all copies in some tiers."""
        if not any(self._held[tier] for tier in tiers):
            return
        for entry in list(self._table.entries.values()):
            gone = [place for place in entry.copies if tier_of(place) in tiers]
            if gone:
                self._drop_and_touch(entry, gone)

    def drop_all(self, entry: Entry) -> None:
        """Drop all copies of an entry."""
        self._drop_and_touch(entry, list(entry.copies))

    def expire(self, max_age_s: float) -> int:
        """Forget copies stored longer ago than that, in tiers whose copies nothing may ever remove; return how many."""
        expired = 0
        while self._ages and next(iter(self._ages.values())) + max_age_s < self.now_s:
            (name, place), _ = self._ages.popitem(last=False)
            entry = self._table.entries.get(name)
            if entry is not None:
                self._drop_and_touch(entry, [place])
                expired += 1
        return expired

    def _remove(self, name: EngineHash, place: Place, left: int | None) -> None:
        """Take a block's copy away; `left`: how many the event says remain."""
        rule = self._learnt.profile.removal
        entry = self._table.entries.get(name)
        gone = [] if entry is None else list(entry.copies) if rule == "one_for_all_tiers" else [place]
        if entry is None or not any(place in entry.copies for place in gone):
            self._counts["removal_unknown"] += 1
            return
        if left is None:
            left = entry.copies.get(place, 0) - 1 if rule == "per_copy" else 0
        if left > 0 and place in entry.copies:
            entry.copies[place] = left
            gone = []
        self._drop_and_touch(entry, gone)

    def _with_all_below(self, names: Iterable[EngineHash]) -> Iterator[EngineHash]:
        """Yield the blocks, and after each what stands below it: that went with it, unlisted (DESIGN 4.10)."""
        for name in names:
            entry = self._table.entries.get(name)
            node = entry.node if entry is not None and entry.copies else None
            yield name
            left = [node] if node is not None else []
            while left:
                for child in left.pop().below or ():
                    held = [below.name for below in child.entries if below.copies]
                    yield from held
                    if held or not child.entries:  # what is gone already took along what was below it
                        left.append(child)

    def _drop_and_touch(self, entry: Entry, places: Iterable[Place]) -> None:
        for place in places:
            self._drop(entry, place)
        self._table.touch(entry)

    def _drop(self, entry: Entry, place: Place) -> None:
        tier = tier_of(place)
        if entry.copies.pop(place, None) is not None:
            self._held[tier] -= 1
        self._ages.pop((entry.name, place), None)
        if tier in self._stamps:
            self._stamps[tier].pop((entry.name, place), None)

    def _stamp(self, copy: Copy, tier: Tier) -> None:
        """Remember a lower tier's copy; more of them than fit prove a clear that no event told (DESIGN 4.11)."""
        stamps = self._stamps[tier]
        stamps[copy] = self.device_clears
        capacity = self._learnt.profile.tier(tier).capacity
        if capacity is None or len(stamps) <= capacity:
            return
        stale = [old for old, clears in stamps.items() if clears < self.device_clears]
        self._counts["silent_clear_proved" if stale else "capacity_exceeded"] += 1
        for name, place in stale:
            self._drop_and_touch(self._table.entries[name], [place])
