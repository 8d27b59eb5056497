"""HiCache's host tier: backups when a page is computed or evicted, loads back, evictions; pure.

`write_through`: a page is copied when it is first stored, `write_through_selective`: when it is stored a second time,
`write_back`: when the device evicts it. A copy takes until the next step; only then it is told.

Source: mem_cache/unified_radix_cache.py, unified_cache/unified_tree_core.py and unified_cache/components/full.py of the
0.5.23 wheel; engines/other-engines.md 1.8.
"""

import heapq
from typing import Literal

from ops.simulator.sglang.dialect import Dialect
from ops.simulator.sglang.events import GPU, HOST, Recorder
from ops.simulator.sglang.tree import Node, Transfer, Tree

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

_HITS = {"write_through": 1, "write_through_selective": 2}


class HostTier:
    """The host's pages and the copies under way between it and the device; amounts are pages."""

    def __init__(self, tree: Tree, recorder: Recorder, dialect: Dialect, write_policy: WritePolicy, pages: int) -> None:
        self.write_policy = write_policy
        self.free = pages
        self._tree = tree
        self._recorder = recorder
        self._dialect = dialect
        self._untold: list[Transfer] = []  # written back, to be told when the eviction ends
        self._writes: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._duplicates: dict[int, Node] = {}  # in both tiers, since when; some are no longer

    @property
    def busy(self) -> bool:
        """Return whether copies are under way."""
        return bool(self._writes or self._loads)

    # ---- to the host

    def count_hit(self, node: Node) -> None:
        """Count that a node was stored or stored again; with enough hits it is backed up, as is what leads to it."""
        if self.write_policy == "write_back" or not node.on_device:
            return
        node.hits += 1
        if node.on_host or node.hits < _HITS[self.write_policy]:
            return
        chain = [node]
        while (parent := chain[-1].parent) is not None and parent.parent is not None and not parent.on_host:
            chain.append(parent)
        for part in reversed(chain):
            if not self._take(len(part.pages)):
                return
            self._tree.set_host(part, present=True)
            self._tree.lock(part)
            part.writing = Transfer(part, [part])
            self._writes.append(part.writing)

    def write_back(self, node: Node) -> bool:
        """Copy a node that the device is about to evict; return whether there was room for it."""
        if not self._take(len(node.pages)):
            return False
        self._tree.set_host(node, present=True)
        self.note_duplicate(node)
        self._untold.append(Transfer(node, [node]))
        node.host_locks.append(self._untold[-1])
        if not self._dialect.hiradix:
            self.tell_written()
        return True

    def tell_written(self) -> None:
        """Tell what was written back and not told yet; until then it stays on the host."""
        untold, self._untold = self._untold, []
        for write in untold:
            self._tell(write.anchor, stored=True)
            self.let_go(write)

    def settle(self) -> None:
        """End all copies that are under way: writes are told, and nothing is kept for them any longer."""
        writes, self._writes = self._writes, []
        for write in writes:
            for node in write.nodes:
                node.writing = None
                self.note_duplicate(node)
                self._tell(node, stored=True)
            self._tree.unlock(write.anchor)
        loads, self._loads = self._loads, []
        for load in loads:
            self._tree.unlock(load.anchor)
            self.let_go(load)
            for node in self._tree.path_up(load.anchor):
                if self.write_policy != "write_back" or node.loading is load:
                    node.loading = None
                    self.note_duplicate(node)

    # ---- from the host

    def begin_load(self, node: Node) -> Transfer:
        """Keep a node's host copy, and with it those above, for a load; `let_go` ends one that finds no room."""
        load = Transfer(node, [node])
        node.host_locks.append(load)
        return load

    def load(self, load: Transfer, nodes: list[Node]) -> None:
        """Copy nodes, root side first, to the device, which has the room; until that ended the host keeps them."""
        for node in nodes:
            if self.write_policy == "write_back":
                node.loading = load
            self._tree.set_device(node, present=True)
            if self._dialect.host_events:
                self._recorder.stored(node.namespace, node.before, node.pages, node.digests, GPU)
        self._tree.lock(load.anchor)
        self._loads.append(load)

    def let_go(self, transfer: Transfer) -> None:
        """Keep host copies no longer for a transfer's sake."""
        for node in transfer.nodes:
            node.host_locks.remove(transfer)
            self._tree.update(node)

    # ---- evictions

    def evict(self, pages: int) -> int:
        """Free pages: with write-back, copies of what the device has too; then host leaves, used longest ago first."""
        freed = self._reclaim(pages) if self.write_policy == "write_back" and not self._dialect.hiradix else 0
        leaves = self._tree.host_leaves
        heap = [(node.used, node.number, node) for node in leaves]
        heapq.heapify(heap)
        while freed < pages and heap:
            node = heapq.heappop(heap)[2]
            if node not in leaves:
                continue
            parent = node.parent
            freed += self.delete(node)
            if parent is not None and parent in leaves:
                heapq.heappush(heap, (parent.used, parent.number, parent))
        return freed

    def delete(self, node: Node) -> int:
        """Take a leaf that is on the host alone out of the tree."""
        self._tell(node, stored=False)
        self.free += len(node.pages)
        self._duplicates.pop(node.number, None)
        node.on_host = False
        self._tree.remove(node)
        return len(node.pages)

    def note_duplicate(self, node: Node) -> None:
        """Remember a node that is in both tiers, with no copy under way, as one whose host copy can go."""
        if node.on_device and node.on_host and node.writing is None and node.loading is None:
            self._duplicates.setdefault(node.number, node)
        else:
            self._duplicates.pop(node.number, None)

    def _reclaim(self, pages: int) -> int:
        """Free host copies of nodes that the device has too; device leaves, which go to the host next, come last."""
        freed = 0
        swept: list[int] = []
        for spared in (True, False):
            for node in self._duplicates.values():
                if freed >= pages:
                    break
                if not (node.on_device and node.on_host):
                    swept.append(node.number)
                    continue
                if spared and node in self._tree.device_leaves:
                    continue
                if node.writing is not None or node.loading is not None or node.host_locks:
                    continue
                self._tell(node, stored=False)
                self._tree.set_host(node, present=False)
                self.free += len(node.pages)
                freed += len(node.pages)
                swept.append(node.number)
        for number in swept:
            self._duplicates.pop(number, None)
        return freed

    def _tell(self, node: Node, *, stored: bool) -> None:
        """Tell what happened to a node's host copy; up to 0.5.10 its end alone, as that of a device copy."""
        if stored and self._dialect.host_events:
            self._recorder.stored(node.namespace, node.before, node.pages, node.digests, HOST)
        elif not stored:
            self._recorder.removed(node.namespace, node.digests, HOST if self._dialect.host_events else GPU)

    def _take(self, pages: int) -> bool:
        """Take free pages, evicting for them; return whether there were enough."""
        short = pages - self.free
        if short > 0 and self.evict(short) < short:
            return False
        self.free -= pages
        return True
