"""The mirror of one holder's cache: engine events in, normalized events out; pure.

It counts copies for every (engine hash, group, tier), finds each engine hash's place in our own chains of block
hashes, and turns both into residency. What changed since the last drain is kept as a set of dirty blocks, so a
relay that cannot publish for a while loses nothing and sends the difference later.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from relays.cache.block_table import BlockTable, Limits
from relays.cache.copies import Copies
from relays.cache.learnt import LearntProfile, place_of, tier_of
from relays.cache.placing import HashCheck, Placer
from relays.cache.runs import Run, runs_of
from relays.engine_events import Cleared, EngineEvent, EngineHash, Moved, Removed, Stored
from schemas.profiles import Profile, Tier


class Mirror:
    """One holder's cache as its engine's events tell it."""

    def __init__(
        self,
        profile: Profile,
        *,
        secret: bytes = b"",
        limits: Limits | None = None,
        hash_check: HashCheck | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()  # what was refused or could not be placed, by reason
        self._learnt = LearntProfile(profile, self.counts)
        self._secret = secret
        self._limits = limits or Limits()
        self._hash_check = hash_check
        self._cleared = False  # everything was lost since the last drain
        self._begin(0.0)

    # ---- what went in

    def apply(self, events: Iterable[EngineEvent], now_s: float = 0.0) -> None:
        """Apply one batch, event by event, in order (DESIGN 4.2).

        Args:
            now_s: monotonic; the age of copies that nothing may ever remove begins here.
        """
        batch = list(events)
        self._copies.now_s = now_s
        if self._learnt.unit(batch):
            self.counts["unit_relearnt"] += 1
            self._lose_everything()
        clears = 0
        for event in batch:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._copies.remove(event)
            elif isinstance(event, Moved):
                self._copies.move(event)
            else:
                self._clear(event, clears)
                clears += 1
        self._settle()

    def forget(self) -> None:
        """Drop everything: the engine started a new life."""
        self._cleared = False
        self._begin(self._copies.now_s)

    def drop_copies(self) -> None:
        """Forget what the holder has, but not where engine hashes stand."""
        self._copies.drop_tiers()
        self._settle()

    def say_again(self) -> None:
        """Make everything that the holder has new to the index."""
        for node in list(self._table.nodes.values()):
            node.sent = 0
        self._table.touch_all()
        self._settle()

    def learn_places(self, depth: int, path: Sequence[int], blocks: Sequence[int], names: Sequence[EngineHash]) -> None:
        """Learn where engine hashes stand, from a replica that knows their tokens: `Placer.learn`."""
        self._placer.learn(depth, path, blocks, names)
        self._settle()

    def learn_upper_bound(self) -> None:
        """Take in that the engine has a group which no rule here fits."""
        self._learnt.upper_bound()

    def learn_windows(self, sizes: tuple[int, ...]) -> None:
        """Take in the attention windows that announce blocks, largest first."""
        self._learnt.windows(sizes)

    def expire(self, now_s: float, max_age_s: float) -> int:
        """Forget copies stored longer ago than that, in tiers whose copies nothing may ever remove; return how many."""
        self._copies.now_s = now_s
        expired = self._copies.expire(max_age_s)
        self.counts["expired"] += expired
        self._settle()
        return expired

    # ---- what is known

    @property
    def profile(self) -> Profile:
        """The holder's profile, completed by what its events said."""
        return self._learnt.profile

    def resident(self) -> Iterator[tuple[int, int]]:
        """Yield (block_hash, residency) of every block that the holder has."""
        for node in self._table.nodes.values():
            residency = self._table.residency(node)
            if residency:
                yield node.hash, residency

    def engine_table(self, tier: Tier) -> Iterator[tuple[int, EngineHash]]:
        """Yield (group, engine_hash) of every copy counted in a tier, placed or not."""
        for entry in self._table.entries.values():
            for place in entry.copies:
                if tier_of(place) == tier:
                    yield self._learnt.group_of(place), entry.name

    def unplaced(self) -> Iterator[tuple[EngineHash, Stored]]:
        """Yield the resident engine hashes whose place is not known, with the store that announced them."""
        for stored in self._table.waiting:
            for name in stored.hashes:
                entry = self._table.entries.get(name)
                if entry is not None and entry.node is None and entry.copies:
                    yield name, stored

    def places(self, names: Iterable[EngineHash]) -> set[int]:
        """Return our hashes of the blocks that these engine hashes name, as far as they are known."""
        entries = (self._table.entries.get(name) for name in names)
        return {entry.node.hash for entry in entries if entry is not None and entry.node is not None}

    def names_of(self, block_hashes: Iterable[int]) -> Iterator[EngineHash]:
        """Yield what the engine calls these blocks, as far as each is known here by one name."""
        for block_hash in block_hashes:
            node = self._table.nodes.get(block_hash)
            if node is not None and len(node.entries) == 1:
                yield node.entries[0].name

    def is_ambiguous(self, block_hashes: Iterable[int]) -> bool:
        """Return whether two live engine hashes claim one of these blocks."""
        return not self._table.ambiguous.isdisjoint(block_hashes)

    def contradicts(self, event: Stored) -> bool:
        """Return whether the event gives a block that is held here another engine hash than the one known."""
        return self._placer.contradicts(event)

    @property
    def ambiguous_blocks(self) -> int:
        """Blocks that two live engine hashes claim; they earn nothing."""
        return len(self._table.ambiguous)

    @property
    def blocks(self) -> int:
        """Engine hashes with at least one copy."""
        return self._table.held

    @property
    def unplaced_blocks(self) -> int:
        """Blocks announced by hash alone that nobody has placed yet."""
        return self._table.waiting.names

    @property
    def pending_blocks(self) -> int:
        """Units of the stores that wait for their parent."""
        return self._table.waiting.units

    @property
    def nodes(self) -> int:
        """Blocks of our chains, those that only link others included."""
        return len(self._table.nodes)

    # ---- what goes out

    @property
    def changed(self) -> bool:
        """Return whether a drain would yield anything."""
        return bool(self._table.dirty) or self._cleared

    def take_cleared(self) -> bool:
        """Return whether the holder lost everything since the last drain; the index starts an epoch there."""
        cleared, self._cleared = self._cleared, False
        return cleared

    def take_runs(self, max_blocks: int) -> list[Run]:
        """Return what changed since the last call as runs, shallow ones first; at most about `max_blocks`."""
        return runs_of(self._table.changes(max_blocks))

    # ---- events

    def _store(self, event: Stored) -> None:
        if event.pairs:
            self._learnt.token_pairs()
        groups = len(self.profile.groups)
        position = self._learnt.group(event)
        if position is None or not self._learnt.pair(position, event.tier):
            return
        if len(self.profile.groups) > groups:
            self._table.touch_all()  # what was credited of the group's class may no longer be whole
        if self.profile.cascade and not self._placer.can_place(event):
            return
        names = self._copies.counted(event)
        self._copies.add(names, place_of(position, event.tier))
        if (event.tokens and event.parent_known) or not event.namespace_known:
            self._placer.place(event)
        elif not event.tokens:
            self._hold(names)

    def _hold(self, names: Iterable[EngineHash]) -> None:
        """Keep hashes that came without tokens until somebody places them; past the bound the oldest are dropped."""
        table = self._table
        for name in names:
            entry = table.entries.get(name)
            dropped = table.waiting.hold(name) if entry is not None and entry.node is None else None
            if dropped is not None:
                self.counts["unplaced_dropped"] += 1
                self._copies.drop_all(table.entries[dropped])

    def _clear(self, event: Cleared, earlier_clears: int) -> None:
        """Drop a tier, or everything, as the event or else the profile says (DESIGN 4.11)."""
        scope = self.profile.clear_scope
        if event.tier is not None:
            self._clear_tier(event.tier)
        elif scope == "device":
            self._copies.device_clears += 1
            self._clear_tier("gpu")
        elif scope == "device_then_host":
            self._clear_tier("gpu" if earlier_clears == 0 else "host")
        else:
            self._lose_everything()

    def _clear_tier(self, tier: Tier) -> None:
        held = self._copies.any_held
        self._copies.drop_tiers((tier,))
        if held and not self._copies.any_held and not self.profile.hash_only_stores:
            self._lose_everything()

    def _settle(self) -> None:
        dropped = self._table.settle()
        if dropped:
            self.counts["places_dropped"] += dropped

    def _lose_everything(self) -> None:
        """Forget all blocks; the index hears of it as one event."""
        self._cleared = self._cleared or any(node.sent for node in self._table.nodes.values())
        self._begin(self._copies.now_s)

    def _begin(self, now_s: float) -> None:
        self._table = BlockTable(self._learnt, self._limits)
        self._copies = Copies(self._table, self._learnt, self.counts, now_s)
        self._placer = Placer(self._table, self._learnt, self.counts, self._secret, self._hash_check)
