"""The mirror of one holder's cache: engine events in, normalized events out; pure.

It counts copies for every (engine hash, group, tier), finds each engine hash's place in our own chains of block
hashes, and turns both into residency. What changed since the last drain is kept as a set of dirty blocks, so a
relay that cannot publish for a while loses nothing and sends the difference later.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import Protocol

import msgspec

from index.hashing import Media, Namespace, Tokens, chain_hashes, pack_tokens, root_hash
from relays.engine_events import Cleared, EngineEvent, EngineHash, Moved, Removed, Stored
from relays.waiting import Waiting
from schemas.profiles import MAX_PAIRS, TIERS, Group, Pair, Profile, Tier

_TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}
_TIER_COUNT = len(TIERS)

Copy = tuple[EngineHash, int]
"""An engine hash and the (group, tier) pair in which it is held."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of what one mirror remembers; past them it forgets or refuses, counted."""

    blocks: int = 8_000_000  # engine hashes with copies
    idle_hashes: int = 200_000  # engine hashes without copies, kept for stores that name no tokens
    pending_blocks: int = 100_000  # units of the stores whose parent is not known yet
    unplaced_blocks: int = 1_000_000  # blocks announced by hash alone that nobody has placed yet


class HashCheck(Protocol):
    """Recomputes an engine's own hash of a prompt's first block, where seed and algorithm are known."""

    def first_block(self, stored: Stored) -> EngineHash | None:
        """Return the engine's name of the block that starts this prompt, or None where it cannot be told."""


class Node:
    """One block of one chain, by our own hash."""

    __slots__ = ("below", "children", "depth", "entries", "hash", "parent", "sent")

    def __init__(self, block_hash: int, depth: int, parent: "Node | None") -> None:
        self.hash = block_hash
        self.depth = depth
        self.parent = parent
        self.children = 0
        self.below: set[Node] | None = None  # the children themselves; kept where removals cascade
        self.entries: list[Entry] = []
        self.sent = 0  # residency that the index was told


class Entry:
    """What is known of one engine hash: copies for each (group, tier), and its place once that is known."""

    __slots__ = ("copies", "name", "node", "opaque")

    def __init__(self, name: EngineHash) -> None:
        self.name = name
        self.copies: dict[int, int] = {}
        self.node: Node | None = None
        self.opaque = False  # belongs to a namespace that no prompt can name


class Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of one chain that changed to the same residency; 0: gone."""

    nodes: list[Node]
    residency: int

    @property
    def head(self) -> Node:
        """Return the run's first block."""
        return self.nodes[0]


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
        self.profile = profile
        self.counts: Counter[str] = Counter()  # what was refused or could not be placed, by reason
        self._secret = secret
        self._limits = limits or Limits()
        self._hash_check = hash_check
        self._roots: dict[tuple[str | None, str | None], int] = {}
        self._group_position: dict[int, int] = {group.index: n for n, group in enumerate(profile.groups)}
        self._learns_unit = not profile.unit
        self._cleared = False  # everything was lost since the last drain
        self._now_s = 0.0
        self._clears = 0  # device clears so far; the age of a lower tier's copies
        self._reset()

    # ---- what went in

    def apply(self, events: Iterable[EngineEvent], now_s: float = 0.0) -> None:
        """Apply one batch, event by event, in order (DESIGN 4.2).

        Args:
            now_s: monotonic; the age of copies that nothing may ever remove begins here.
        """
        batch = list(events)
        self._now_s = now_s
        if self._learns_unit:
            self._learn_unit(batch)
        clears = 0
        for event in batch:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            elif isinstance(event, Moved):
                self._move(event)
            else:
                self._clear(event, clears)
                clears += 1
        self._settle()

    def forget(self) -> None:
        """Drop everything: the engine started a new life."""
        self._reset()

    def drop_copies(self) -> None:
        """Forget what the holder has, but not where engine hashes stand."""
        for entry in list(self._entries.values()):
            for pair in list(entry.copies):
                self._drop_copies(entry, pair)
            self._touch(entry)
        self._settle()

    def say_again(self) -> None:
        """Make everything that the holder has new to the index."""
        for node in list(self._nodes.values()):
            node.sent = 0
            self._touch_node(node)
        self._settle()

    def learn_places(self, depth: int, path: Sequence[int], blocks: Sequence[int], names: Sequence[EngineHash]) -> None:
        """Learn where engine hashes stand, from a replica that knows their tokens (DESIGN 6, pools).

        Args:
            depth: of the first of `blocks`; `path` leads up to it from the last multiple of 128.
            names: what the replica's engine calls the blocks, parallel to them; 0: nothing.
        """
        node: Node | None = None
        for position, block_hash in enumerate((*path, *blocks)):
            node = self._node_at(block_hash, node, depth - len(path) + position)
            name = names[position - len(path)] if position >= len(path) else 0
            if not name:
                continue
            entry = self._entries.get(name)
            if entry is None:
                entry = self._entries[name] = Entry(name)
            if not entry.copies:
                self._idle[name] = None
                self._idle.move_to_end(name)
            self._attach(name, node)
        while self._ready:
            self._place_one(self._ready.pop())
        if node is not None:
            self._touch_node(node)
        self._settle()

    def expire(self, now_s: float, max_age_s: float) -> int:
        """Forget copies stored longer ago than that, in tiers whose copies nothing may ever remove; return how many."""
        expired = 0
        while self._ages and next(iter(self._ages.values())) + max_age_s < now_s:
            (name, pair), _ = self._ages.popitem(last=False)
            entry = self._entries.get(name)
            if entry is not None:
                self._drop_copies(entry, pair)
                self._touch(entry)
                expired += 1
        self.counts["expired"] += expired
        self._settle()
        return expired

    # ---- what is known

    def residency(self, node: Node) -> int:
        """Return the node's bits: a (group class, tier) pair is set where every group of the class has a copy."""
        if not node.entries:
            return 0
        bits = 0
        ambiguous = False
        for number, pair in enumerate(self.profile.pairs):
            tier = _TIER_NUMBER[pair.tier]
            for position in self._class_positions[pair.group_class]:
                holders = sum(position * _TIER_COUNT + tier in entry.copies for entry in node.entries)
                ambiguous |= holders > 1
                if holders != 1:
                    break
            else:
                bits |= 1 << number
        if ambiguous:
            self._ambiguous.add(node.hash)
        else:
            self._ambiguous.discard(node.hash)
        return bits

    def resident(self) -> Iterator[tuple[int, int]]:
        """Yield (block_hash, residency) of every block that the holder has."""
        for node in self._nodes.values():
            residency = self.residency(node)
            if residency:
                yield node.hash, residency

    def engine_table(self, tier: Tier) -> Iterator[tuple[int, EngineHash]]:
        """Yield (group, engine_hash) of every copy counted in a tier, placed or not."""
        number = _TIER_NUMBER[tier]
        groups = [group.index for group in self.profile.groups]
        for entry in self._entries.values():
            for key in entry.copies:
                if key % _TIER_COUNT == number:
                    yield groups[key // _TIER_COUNT], entry.name

    def unplaced(self) -> Iterator[tuple[EngineHash, Stored]]:
        """Yield the resident engine hashes whose place is not known, with the store that announced them."""
        for stored in self._waiting:
            for name in stored.hashes:
                entry = self._entries.get(name)
                if entry is not None and entry.node is None and entry.copies:
                    yield name, stored

    def places(self, names: Iterable[EngineHash]) -> set[int]:
        """Return our hashes of the blocks that these engine hashes name, as far as they are known."""
        entries = (self._entries.get(name) for name in names)
        return {entry.node.hash for entry in entries if entry is not None and entry.node is not None}

    def names_of(self, block_hashes: Iterable[int]) -> Iterator[EngineHash]:
        """Yield what the engine calls these blocks, as far as each is known here by one name."""
        for block_hash in block_hashes:
            node = self._nodes.get(block_hash)
            if node is not None and len(node.entries) == 1:
                yield node.entries[0].name

    def is_ambiguous(self, block_hashes: Iterable[int]) -> bool:
        """Return whether two live engine hashes claim one of these blocks."""
        return not self._ambiguous.isdisjoint(block_hashes)

    def contradicts(self, event: Stored) -> bool:
        """Return whether the event gives a block that is held here another engine hash than the one known."""
        if event.parent is not None or event.masked or not event.tokens or not event.namespace_known:
            return False
        hashes = chain_hashes(self._root(event), pack_tokens(event.tokens), self.profile.unit)
        per_block = event.block_size // self.profile.unit
        for number, name in enumerate(event.hashes):
            node = self._nodes.get(hashes[(number + 1) * per_block - 1])
            if node is not None and any(entry.name != name and entry.copies for entry in node.entries):
                return True
        return False

    @property
    def ambiguous_blocks(self) -> int:
        """Blocks that two live engine hashes claim; they earn nothing."""
        return len(self._ambiguous)

    @property
    def blocks(self) -> int:
        """Engine hashes with at least one copy."""
        return len(self._entries) - len(self._idle)

    @property
    def unplaced_blocks(self) -> int:
        """Blocks announced by hash alone that nobody has placed yet."""
        return len(self._unplaced)

    @property
    def pending_blocks(self) -> int:
        """Units of the stores that wait for their parent."""
        return self._waiting.units

    @property
    def nodes(self) -> int:
        """Blocks of our chains, those that only link others included."""
        return len(self._nodes)

    # ---- what goes out

    @property
    def changed(self) -> bool:
        """Return whether a drain would yield anything."""
        return bool(self._dirty) or self._cleared

    def take_cleared(self) -> bool:
        """Return whether the holder lost everything since the last drain; the index starts an epoch there."""
        cleared, self._cleared = self._cleared, False
        return cleared

    def take_runs(self, max_blocks: int) -> list[Run]:
        """Return what changed since the last call as runs, shallow ones first; at most about `max_blocks`."""
        changes: list[tuple[Node, int]] = []
        while self._dirty and len(changes) < max_blocks:
            node = self._dirty.popitem(last=False)[0]
            residency = self.residency(node)
            if residency != node.sent:
                node.sent = residency
                changes.append((node, residency))
            self._release(node)
        changes.sort(key=lambda change: change[0].depth)
        runs: list[Run] = []
        open_runs: dict[int, Run] = {}  # by the hash of the run's last block
        for node, residency in changes:
            run = open_runs.pop(node.parent.hash, None) if node.parent else None
            if run is None or run.residency != residency:
                run = Run([], residency)
                runs.append(run)
            run.nodes.append(node)
            open_runs[node.hash] = run
        return runs

    # ---- stores

    def _store(self, event: Stored) -> None:
        if event.pairs and self.profile.drafting != "pairs":
            self._change_profile(drafting="pairs")  # known by the shape of the tokens alone (DESIGN 4.8)
        position = self._learn_group(event)
        if position is None or (self.profile.cascade and not self._can_place(event)):
            return
        pair = position * _TIER_COUNT + _TIER_NUMBER[event.tier]
        names = self._counted_names(event)
        for name in names:
            self._add_copy(name, pair, event.tier)
        if not event.namespace_known:
            self._give_up(event, "namespace_unknown")
        elif event.tokens and event.parent_known:
            self._place(event)
        elif not event.tokens:
            self._hold_unplaced(names)

    def _can_place(self, event: Stored) -> bool:
        """Return whether the blocks have a place; where removals cascade, no others are kept, for they find only these.

        A block whose parent is not known here is older than this life's first event, or below one that is: its own end
        may be told by the end of any ancestor, so it must not wait for one either.
        """
        parent = self._entries.get(event.parent) if event.parent is not None else None
        if event.namespace_known and (event.parent is None or (parent is not None and parent.node is not None)):
            return True
        self.counts["parent_unknown" if event.namespace_known else "namespace_unknown"] += len(event.hashes)
        return False

    def _hold_unplaced(self, names: Iterable[EngineHash]) -> None:
        """Keep hashes that came without tokens until somebody places them; the oldest are forgotten past the bound."""
        for name in names:
            entry = self._entries.get(name)
            if entry is not None and entry.node is None:
                self._unplaced[name] = None
        while len(self._unplaced) > self._limits.unplaced_blocks:
            name, _ = self._unplaced.popitem(last=False)
            entry = self._entries.get(name)
            if entry is not None and entry.node is None:
                self.counts["unplaced_dropped"] += 1
                for pair in list(entry.copies):
                    self._drop_copies(entry, pair)
                self._forget_entry(entry)

    def _counted_names(self, event: Stored | Removed) -> tuple[EngineHash, ...]:
        """Return the hashes that stand for whole retrieval units: the last of each chunk (DESIGN 4.12)."""
        chunk = self.profile.tier(event.tier).chunk
        return event.hashes if chunk == 1 or event.names_chunks else event.hashes[chunk - 1 :: chunk]

    def _add_copy(self, name: EngineHash, pair: int, tier: Tier) -> None:
        entry = self._entries.get(name)
        if entry is None:
            if self.blocks >= self._limits.blocks:
                self.counts["limit_blocks"] += 1
                return
            entry = self._entries[name] = Entry(name)
        else:
            self._idle.pop(name, None)
        self._held[pair % _TIER_COUNT] += pair not in entry.copies
        if self.profile.re_announces_hits:
            entry.copies[pair] = 1
        else:
            entry.copies[pair] = entry.copies.get(pair, 0) + 1
        self._touch(entry)
        if self.profile.ages(tier):
            self._ages[name, pair] = self._now_s
            self._ages.move_to_end((name, pair))
        stamps = self._stamps.get(tier)
        if stamps is not None:
            self._stamp((name, pair), tier, stamps)

    def _place(self, event: Stored) -> None:
        """Find the blocks' places in our chains, and those of what waited for them."""
        self._ready.append(event)
        while self._ready:
            self._place_one(self._ready.pop())

    def _place_one(self, event: Stored) -> None:
        """Find the blocks' places, or keep the event until its parent's place is known."""
        if event.masked:
            # which block of the range each hash names is known once another group's event has placed it
            self.counts["masked_unplaced"] += sum(not self._is_placed(name) for name in event.hashes)
            return
        if event.media and event.block_size > self.profile.unit and all(map(self._is_placed, event.hashes)):
            return  # a smaller block has told more exactly where its media end
        if event.parent is None:
            parent = None
            if self._hidden_namespace(event):
                self._give_up(event, "namespace_hidden")
                return
        else:
            known = self._entries.get(event.parent)
            if known is not None and known.opaque:
                self._give_up(event, "namespace_hidden")
                return
            if known is None or known.node is None:
                self._wait(event.parent, event)
                return
            parent = known.node
        named = self._without_nameless_media(event)
        if named.hashes:
            self._link(named, parent)

    def _without_nameless_media(self, event: Stored) -> Stored:
        """Return the blocks before the first one with a placeholder whose picture the event does not name."""
        placeholders, size = self.profile.placeholders, event.block_size
        for number in range(len(event.hashes) if placeholders else 0):
            block = event.tokens[number * size : (number + 1) * size + event.pairs]
            if any(token in placeholders for token in block) and not (event.media and event.media[number]):
                self._give_up(msgspec.structs.replace(event, hashes=event.hashes[number:]), "media_hidden")
                return msgspec.structs.replace(
                    event,
                    hashes=event.hashes[:number],
                    tokens=event.tokens[: number * size + event.pairs],
                    media=event.media[:number],
                )
        return event

    def _is_placed(self, name: EngineHash) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.node is not None

    def _link(self, event: Stored, parent: Node | None) -> None:
        unit = self.profile.unit
        if event.block_size % unit:
            self.counts["block_size_off_unit"] += 1
            return
        per_block = event.block_size // unit
        tokens = pack_tokens(event.tokens)
        if event.media:
            hashes = self._chain_with_keys(event, parent, tokens)
        else:
            start = parent.hash if parent else self._root(event)
            hashes = chain_hashes(start, tokens, unit, pairs=event.pairs)
        node = parent
        for number, block_hash in enumerate(hashes):
            if event.only_known and block_hash not in self._nodes:
                self.counts["chain_unknown"] += len(event.hashes) - number // per_block
                break
            node = self._node(block_hash, node)
            if (number + 1) % per_block == 0:
                self._attach(event.hashes[number // per_block], node)
        if node is not None and node is not parent:
            self._touch_node(node)  # so that a range nobody holds is let go of

    def _chain_with_keys(self, event: Stored, parent: Node | None, tokens: Tokens) -> list[int]:
        """Hash a range whose blocks carry media keys, exactly as the event lists them for each block."""
        unit, size = self.profile.unit, event.block_size
        hashed = parent.hash if parent else self._root(event)
        hashes: list[int] = []
        width = 8 if tokens.wide else 4
        view = memoryview(tokens.data)
        for block, keys in enumerate(event.media):
            media = [Media(key.id, key.offset, size - key.offset) for key in keys]
            end = (block + 1) * size + (1 if event.pairs else 0)
            part = Tokens(view[block * size * width : end * width], tokens.wide)
            part_hashes = chain_hashes(hashed, part, unit, pairs=event.pairs, media=media)
            hashes += part_hashes
            hashed = part_hashes[-1]
        return hashes

    def _attach(self, name: EngineHash, node: Node) -> None:
        entry = self._entries.get(name)
        if entry is None or entry.node is node:
            return
        if entry.node is not None:
            # one engine hash for two contents: neither is credited while copies of it live
            self.counts["hash_names_two_blocks"] += 1
            self._detach(entry)
            entry.opaque = True
            return
        if entry.opaque:
            return
        entry.node = node
        node.entries.append(entry)
        self._unplaced.pop(name, None)
        self._touch_node(node)
        self._ready += self._waiting.take(name)

    def _node(self, block_hash: int, parent: Node | None) -> Node:
        return self._node_at(block_hash, parent, parent.depth + 1 if parent else 0)

    def _node_at(self, block_hash: int, parent: Node | None, depth: int) -> Node:
        node = self._nodes.get(block_hash)
        if node is None:
            node = self._nodes[block_hash] = Node(block_hash, depth, parent)
            if parent:
                parent.children += 1
                if self.profile.cascade:
                    parent.below = parent.below or set()
                    parent.below.add(node)
        return node

    def _root(self, event: Stored) -> int:
        key = (event.adapter, event.salt)
        root = self._roots.get(key)
        if root is None:
            profile = self.profile
            namespace = Namespace(profile.model, profile.unit, event.pairs, event.adapter, event.salt)
            root = self._roots[key] = root_hash(namespace, self._secret)
        return root

    def _hidden_namespace(self, event: Stored) -> bool:
        """Return whether the engine's own hash shows a namespace that the event does not (DESIGN 4.13)."""
        if self._hash_check is None or not event.hashes or event.masked:
            return False
        expected = self._hash_check.first_block(event)
        return expected is not None and expected != event.hashes[0]

    def _give_up(self, event: Stored, reason: str) -> None:
        for name in event.hashes:
            entry = self._entries.get(name)
            if entry is not None and entry.node is None and not entry.opaque:
                entry.opaque = True
                self.counts[reason] += 1

    def _wait(self, parent: EngineHash, event: Stored) -> None:
        if not event.hashes:
            return
        self.counts["parent_unknown"] += len(event.hashes)
        self.counts["pending_dropped"] += self._waiting.add(parent, event, len(event.tokens) // self.profile.unit)

    # ---- removals and clears

    def _remove(self, event: Removed) -> None:
        position = self._group_position.get(event.group, -1)
        pair = position * _TIER_COUNT + _TIER_NUMBER[event.tier]
        names: Iterable[EngineHash] = self._counted_names(event)
        left = dict(zip(event.hashes, event.remaining, strict=False)) if event.remaining else {}
        for name in self._with_all_below(names) if self.profile.cascade else names:
            self._remove_copy(name, pair, left.get(name))

    def _remove_copy(self, name: EngineHash, pair: int, left: int | None) -> None:
        """Take one copy away, or all of them as the profile's removals do; `left`: how many the event says remain."""
        rule = self.profile.removal
        entry = self._entries.get(name)
        gone = [] if entry is None else list(entry.copies) if rule == "one_for_all_tiers" else [pair]
        if entry is None or not any(pair in entry.copies for pair in gone):
            self.counts["removal_unknown"] += 1
            return
        if left is None:
            left = entry.copies.get(pair, 0) - 1 if rule == "per_copy" else 0
        if left > 0 and pair in entry.copies:
            entry.copies[pair] = left
        else:
            for pair_gone in gone:
                self._drop_copies(entry, pair_gone)
        self._touch(entry)

    def _with_all_below(self, names: Iterable[EngineHash]) -> Iterator[EngineHash]:
        """Yield the blocks, and after each what stands below it: that went with it, unlisted (DESIGN 4.10)."""
        for name in names:
            entry = self._entries.get(name)
            node = entry.node if entry is not None and entry.copies else None
            yield name
            left = [node] if node is not None else []
            while left:
                for child in left.pop().below or ():
                    held = [below.name for below in child.entries if below.copies]
                    yield from held
                    if held or not child.entries:  # what is gone already took along what was below it
                        left.append(child)

    def _move(self, event: Moved) -> None:
        """Let copies change their tier in one step; of a copy that is not known nothing is concluded."""
        position = self._group_position.get(event.group)
        if position is None or not self._learn_pair(position, event.tier):
            self.counts["move_unknown"] += len(event.hashes)
            return
        before, after = (position * _TIER_COUNT + _TIER_NUMBER[tier] for tier in (event.before, event.tier))
        for name in event.hashes:
            entry = self._entries.get(name)
            if entry is None or before not in entry.copies:
                self.counts["move_unknown"] += 1
                continue
            entry.copies[before] -= 1
            if not entry.copies[before]:
                self._drop_copies(entry, before)
            self._add_copy(name, after, event.tier)

    def _drop_copies(self, entry: Entry, pair: int) -> None:
        if entry.copies.pop(pair, None) is not None:
            self._held[pair % _TIER_COUNT] -= 1
        self._ages.pop((entry.name, pair), None)
        stamps = self._stamps.get(TIERS[pair % _TIER_COUNT])
        if stamps is not None:
            stamps.pop((entry.name, pair), None)

    def _clear(self, event: Cleared, earlier_clears: int) -> None:
        """Drop a tier, or everything, as the event or else the profile says (DESIGN 4.11)."""
        if event.tier is not None:
            self._clear_tiers((event.tier,))
        elif self.profile.clear_scope == "device":
            self._clears += 1
            self._clear_tiers(("gpu",))
        elif self.profile.clear_scope == "device_then_host":
            self._clear_tiers(("gpu",) if earlier_clears == 0 else ("host",))
        else:
            self._reset(told=True)

    def _clear_tiers(self, tiers: Sequence[Tier]) -> None:
        numbers = {_TIER_NUMBER[tier] for tier in tiers}
        if not any(self._held[number] for number in numbers):
            return
        for entry in list(self._entries.values()):
            gone = [pair for pair in entry.copies if pair % _TIER_COUNT in numbers]
            for pair in gone:
                self._drop_copies(entry, pair)
            if gone:
                self._touch(entry)
        if not any(self._held) and not self.profile.hash_only_stores:
            self._reset(told=True)

    def _stamp(self, copy: Copy, tier: Tier, stamps: dict[Copy, int]) -> None:
        """Remember a lower tier's copy; more of them than fit prove a clear that no event told (DESIGN 4.11)."""
        stamps[copy] = self._clears
        capacity = self.profile.tier(tier).capacity
        if capacity is None or len(stamps) <= capacity:
            return
        stale = [old for old, clears in stamps.items() if clears < self._clears]
        self.counts["silent_clear_proved" if stale else "capacity_exceeded"] += 1
        for name, pair in stale:
            entry = self._entries[name]
            self._drop_copies(entry, pair)
            self._touch(entry)

    # ---- learning what the profile leaves open

    def _learn_unit(self, batch: Sequence[EngineEvent]) -> None:
        """Take the unit from block sizes; where a smaller one appears, what was hashed in larger ones is void."""
        unit = self.profile.unit
        for event in batch:
            if isinstance(event, Stored) and event.tokens:
                unit = gcd(unit, event.block_size)
        if unit != self.profile.unit:
            if self.profile.unit:
                self.counts["unit_relearnt"] += 1
                self._reset(told=True)
            self._change_profile(unit=unit)

    def _learn_group(self, event: Stored) -> int | None:
        """Return the position of the event's group, taking in a group or a tier that is seen first here."""
        position = self._group_position.get(event.group)
        if position is None:
            if not event.block_size:
                self.counts["group_unknown"] += len(event.hashes)
                return None
            group = event.group_spec or Group(event.group, "full", event.block_size)
            position = len(self.profile.groups)
            self._group_position[event.group] = position
            self._change_profile(groups=(*self.profile.groups, group))
            if len(self._class_positions[group.group_class]) > 1:  # what its class was credited is no longer whole
                for node in self._nodes.values():
                    self._touch_node(node)
        return position if self._learn_pair(position, event.tier) else None

    def _learn_pair(self, position: int, tier: Tier) -> bool:
        """Return whether a group's copies in a tier have a bit, giving them one where there is room."""
        pair = Pair(self.profile.groups[position].group_class, tier)
        if pair not in self.profile.pairs:
            if len(self.profile.pairs) == MAX_PAIRS:
                self.counts["pairs_exhausted"] += 1
                return False
            self._change_profile(pairs=(*self.profile.pairs, pair))
        return True

    def learn_upper_bound(self) -> None:
        """Take in that the engine has a group which no rule here fits."""
        if not self.profile.upper_bound:
            self._change_profile(upper_bound=True)

    def learn_windows(self, sizes: tuple[int, ...]) -> None:
        """Take in the attention windows that announce blocks; where there are several, one alone is an upper bound."""
        if sizes != self.profile.window_sizes:
            self._change_profile(window_sizes=sizes, upper_bound=len(sizes) > 1)

    def _change_profile(self, **changes: object) -> None:
        self.profile = msgspec.structs.replace(self.profile, **changes)
        self._index_classes()

    def _index_classes(self) -> None:
        self._class_positions: dict[object, list[int]] = {}
        for position, group in enumerate(self.profile.groups):
            self._class_positions.setdefault(group.group_class, []).append(position)

    # ---- bookkeeping

    def _reset(self, *, told: bool = False) -> None:
        """Forget all blocks; `told`: the index hears of it as one event."""
        had_any = told and any(node.sent for node in self._nodes.values())
        self._entries: dict[EngineHash, Entry] = {}
        self._nodes: dict[int, Node] = {}
        self._waiting = Waiting(self._limits.pending_blocks)
        self._ready: list[Stored] = []  # waited for a parent that has its place now
        self._idle: OrderedDict[EngineHash, None] = OrderedDict()
        self._dirty: OrderedDict[Node, None] = OrderedDict()
        self._touched: dict[EngineHash, Entry] = {}
        self._touched_nodes: dict[Node, None] = {}  # since the last batch
        self._held = [0] * _TIER_COUNT  # (engine hash, group) pairs with copies, by tier
        self._ambiguous: set[int] = set()
        self._unplaced: OrderedDict[EngineHash, None] = OrderedDict()
        self._ages: OrderedDict[Copy, float] = OrderedDict()  # when a copy was stored last, where copies age
        self._stamps: dict[Tier, dict[Copy, int]] = {
            tier.name: {} for tier in self.profile.tiers if tier.capacity is not None and tier.name != "gpu"
        }
        self._cleared = had_any or (told and self._cleared)
        self._index_classes()

    def _touch(self, entry: Entry) -> None:
        self._touched[entry.name] = entry
        if entry.node is not None:
            self._touch_node(entry.node)

    def _touch_node(self, node: Node) -> None:
        self._dirty[node] = None
        self._touched_nodes[node] = None

    def _settle(self) -> None:
        """After a batch: let go of hashes without copies, and of blocks that came and went unseen."""
        for name, entry in self._touched.items():
            if not entry.copies and self._entries.get(name) is entry:
                self._rest(entry)
        self._touched.clear()
        while len(self._idle) > self._limits.idle_hashes:
            name = next(iter(self._idle))
            self._forget_entry(self._entries[name])
        for node in self._touched_nodes:
            if node in self._dirty and not node.sent and not self.residency(node):
                del self._dirty[node]
                self._release(node)
        self._touched_nodes.clear()

    def _rest(self, entry: Entry) -> None:
        """Keep a hash without copies only where a later event may need its place (DESIGN 4.5)."""
        if entry.node is not None and (entry.node.children or self.profile.hash_only_stores):
            self._idle[entry.name] = None
            self._idle.move_to_end(entry.name)
        else:
            self._forget_entry(entry)

    def _drop_entry(self, entry: Entry) -> None:
        self._idle.pop(entry.name, None)
        self._unplaced.pop(entry.name, None)
        self._waiting.forget(entry.name)
        self._entries.pop(entry.name, None)

    def _forget_entry(self, entry: Entry) -> None:
        self._drop_entry(entry)
        node = entry.node
        if node is not None:
            node.entries.remove(entry)
            self._release(node)

    def _detach(self, entry: Entry) -> None:
        node = entry.node
        if node is not None:
            entry.node = None
            node.entries.remove(entry)
            self._touch_node(node)

    def _release(self, node: Node | None) -> None:
        """Let go of a block that nothing refers to, and then of its ancestors that nothing refers to."""
        while node is not None and not node.children and not node.sent and node not in self._dirty:
            if any(entry.copies for entry in node.entries):
                return
            if node.entries and self.profile.hash_only_stores:
                return
            if self._nodes.get(node.hash) is not node:
                return
            del self._nodes[node.hash]
            self._ambiguous.discard(node.hash)
            for entry in node.entries:
                self._drop_entry(entry)
            node.entries.clear()
            child, node = node, node.parent
            if node is not None:
                node.children -= 1
                if node.below is not None:
                    node.below.discard(child)


def path_of(node: Node, band_blocks: int) -> list[int]:
    """Return the hashes from the last multiple of `band_blocks` up to the node's parent, root side first."""
    path: list[int] = []
    current = node.parent
    for _ in range(node.depth % band_blocks):
        assert current is not None  # depth counts the ancestors
        path.append(current.hash)
        current = current.parent
    path.reverse()
    return path
