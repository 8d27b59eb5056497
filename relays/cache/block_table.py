"""What one mirror knows of blocks: engine hashes with their copies, our chains, and what of both changed; pure."""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from relays.cache.learnt import LearntProfile, Place
from relays.cache.waiting import Waiting
from relays.engine_events import EngineHash


class Limits(msgspec.Struct, frozen=True):
    """Bounds of what one mirror remembers; past them it forgets or refuses, counted."""

    blocks: int = 8_000_000  # engine hashes with copies
    idle_hashes: int = 200_000  # engine hashes without copies, kept for stores that name no tokens
    pending_blocks: int = 100_000  # units of the stores whose parent is not known yet
    unplaced_blocks: int = 1_000_000  # blocks announced by hash alone that nobody has placed yet


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
    """What is known of one engine hash: how many copies in each place, and its node once that is known."""

    __slots__ = ("copies", "name", "node", "opaque")

    def __init__(self, name: EngineHash) -> None:
        self.name = name
        self.copies: dict[Place, int] = {}
        self.node: Node | None = None
        self.opaque = False  # belongs to a namespace that no prompt can name


class BlockTable:
    """Entries by engine hash and nodes by block hash, each kept as long as anything may still refer to it."""

    def __init__(self, learnt: LearntProfile, limits: Limits) -> None:
        self.entries: dict[EngineHash, Entry] = {}
        self.nodes: dict[int, Node] = {}
        self.dirty: OrderedDict[Node, None] = OrderedDict()  # may differ from what the index was told
        self.ambiguous: set[int] = set()  # block hashes that two live engine hashes claim
        self.waiting = Waiting(limits.pending_blocks, limits.unplaced_blocks)
        self.limits = limits
        self._learnt = learnt
        self._idle: OrderedDict[EngineHash, None] = OrderedDict()  # entries without copies
        self._touched: dict[EngineHash, Entry] = {}  # since the last settlement
        self._touched_nodes: dict[Node, None] = {}

    @property
    def held(self) -> int:
        """Entries with at least one copy."""
        return len(self.entries) - len(self._idle)

    def entry_of(self, name: EngineHash) -> Entry | None:
        """Return the entry to which a copy is about to come; None: there are too many."""
        entry = self.entries.get(name)
        if entry is not None:
            self._idle.pop(name, None)
        elif self.held < self.limits.blocks:
            entry = self.entries[name] = Entry(name)
        return entry

    def idle_entry_of(self, name: EngineHash) -> Entry:
        """Return the entry of a hash whose node alone matters."""
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = Entry(name)
        if not entry.copies:
            self._idle[name] = None
            self._idle.move_to_end(name)
        return entry

    def node_at(self, block_hash: int, parent: Node | None, depth: int) -> Node:
        """Return the node of a block, made where it is new."""
        node = self.nodes.get(block_hash)
        if node is None:
            node = self.nodes[block_hash] = Node(block_hash, depth, parent)
            if parent:
                parent.children += 1
                if self._learnt.profile.cascade:
                    parent.below = parent.below or set()
                    parent.below.add(node)
        return node

    def attach(self, entry: Entry, node: Node) -> None:
        """Give an entry its node."""
        entry.node = node
        node.entries.append(entry)
        self.waiting.placed(entry.name)
        self.touch_node(node)

    def detach(self, entry: Entry) -> None:
        """Take an entry's node away."""
        node, entry.node = entry.node, None
        if node is not None:
            node.entries.remove(entry)
            self.touch_node(node)

    def forget(self, entry: Entry) -> None:
        """Let go of an entry, and of what was kept for it alone."""
        self._drop(entry)
        if entry.node is not None:
            entry.node.entries.remove(entry)
            self._release(entry.node)

    def is_placed(self, name: EngineHash) -> bool:
        """Return whether an engine hash has a node."""
        entry = self.entries.get(name)
        return entry is not None and entry.node is not None

    # ---- what changed

    def touch(self, entry: Entry) -> None:
        """Note that an entry's copies changed."""
        self._touched[entry.name] = entry
        if entry.node is not None:
            self.touch_node(entry.node)

    def touch_node(self, node: Node) -> None:
        """Note that a node's residency may have changed."""
        self.dirty[node] = None
        self._touched_nodes[node] = None

    def touch_all(self) -> None:
        """Note that every residency may have changed."""
        for node in self.nodes.values():
            self.touch_node(node)

    def settle(self) -> int:
        """After a batch: let go of entries without copies, and of nodes that came and went unseen.

        Returns:
            How many places were forgotten for want of room.
        """
        for name, entry in self._touched.items():
            if not entry.copies and self.entries.get(name) is entry:
                self._rest(entry)
        self._touched.clear()
        idle = len(self._idle)
        while len(self._idle) > self.limits.idle_hashes:
            self.forget(self.entries[next(iter(self._idle))])
        dropped = idle - len(self._idle)
        for node in self._touched_nodes:
            if node in self.dirty and not node.sent and not self.residency(node):
                del self.dirty[node]
                self._release(node)
        self._touched_nodes.clear()
        return dropped

    def residency(self, node: Node) -> int:
        """Return the node's bits: a (group class, tier) pair is set where every group of the class has a copy."""
        entries = node.entries
        if not entries:
            return 0
        residency = 0
        ambiguous = False
        for bit, places in self._learnt.bits:
            for place in places:
                holders = sum(place in entry.copies for entry in entries)
                ambiguous |= holders > 1
                if holders != 1:
                    break
            else:
                residency |= bit
        if ambiguous:
            self.ambiguous.add(node.hash)
        else:
            self.ambiguous.discard(node.hash)
        return residency

    def changes(self, most: int) -> Iterator[tuple[Node, int]]:
        """Yield nodes with a residency that the index has not been told, and count them as told."""
        while self.dirty and most > 0:
            node = self.dirty.popitem(last=False)[0]
            residency = self.residency(node)
            if residency != node.sent:
                node.sent = residency
                most -= 1
                yield node, residency
            self._release(node)

    # ---- letting go

    def _rest(self, entry: Entry) -> None:
        """Keep an entry without copies only where a later event may need its node (DESIGN 4.5)."""
        if entry.node is not None and (entry.node.children or self._learnt.profile.hash_only_stores):
            self._idle[entry.name] = None
            self._idle.move_to_end(entry.name)
        else:
            self.forget(entry)

    def _drop(self, entry: Entry) -> None:
        self._idle.pop(entry.name, None)
        self.waiting.forget(entry.name)
        self.entries.pop(entry.name, None)

    def _release(self, node: Node | None) -> None:
        """Let go of a node that nothing refers to, and then of its ancestors that nothing refers to."""
        while node is not None and not node.children and not node.sent and node not in self.dirty:
            if any(entry.copies for entry in node.entries):
                return
            if node.entries and self._learnt.profile.hash_only_stores:
                return
            if self.nodes.get(node.hash) is not node:
                return
            del self.nodes[node.hash]
            self.ambiguous.discard(node.hash)
            for entry in node.entries:
                self._drop(entry)
            node.entries.clear()
            child, node = node, node.parent
            if node is not None:
                node.children -= 1
                if node.below is not None:
                    node.below.discard(child)
