"""HiCache's host tier: backups when a page is computed or evicted, loads back, evictions; pure.

`write_through`: a page is copied when it is first stored, `write_through_selective`: when it is stored a second time,
`write_back`: when the device evicts it. A copy takes until the next step; only then it is told.

Source: mem_cache/unified_radix_cache.py, unified_cache/unified_tree_core.py and unified_cache/components/full.py of the
0.5.23 wheel; engines/other-engines.md 1.8.
"""

import heapq
from typing import TYPE_CHECKING, Literal

from ops.simulator.sglang.tree import Match, Node, Transfer

if TYPE_CHECKING:
    from ops.simulator.sglang.cache import Cache

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

LOAD_BACK_TOKENS = 10
"""A shorter run of host pages is computed again (`load_back_threshold`)."""

_HITS = {"write_through": 1, "write_through_selective": 2}


class HostTier:
    """The host's pages and the copies under way; amounts are pages."""

    def __init__(self, cache: "Cache", write_policy: WritePolicy, pages: int, *, hiradix: bool) -> None:
        self.write_policy = write_policy
        self.free = pages
        self._cache = cache
        self._hiradix = hiradix
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
            self._cache.tree.set_host(part, present=True)
            self._cache.lock(part)
            part.writing = Transfer(part, [part])
            self._writes.append(part.writing)

    def write_back(self, node: Node) -> bool:
        """Copy a node that the device is about to evict; return whether there was room for it."""
        if not self._take(len(node.pages)):
            return False
        self._cache.tree.set_host(node, present=True)
        self.note_duplicate(node)
        self._untold.append(Transfer(node, [node]))
        node.host_locks.append(self._untold[-1])
        if not self._hiradix:
            self.tell_written()
        return True

    def tell_written(self) -> None:
        """Tell what was written back and not told yet; until then it stays on the host."""
        untold, self._untold = self._untold, []
        for write in untold:
            self._cache.tell_host(write.anchor, stored=True)
            self._unlock_host(write)

    def settle(self) -> None:
        """End all copies that are under way: writes are told, and nothing is kept for them any longer."""
        writes, self._writes = self._writes, []
        for write in writes:
            for node in write.nodes:
                node.writing = None
                self.note_duplicate(node)
                self._cache.tell_host(node, stored=True)
            self._cache.unlock(write.anchor)
        loads, self._loads = self._loads, []
        for load in loads:
            self._cache.unlock(load.anchor)
            self._unlock_host(load)
            for node in self._cache.tree.path_up(load.anchor):
                if self.write_policy != "write_back" or node.loading is load:
                    node.loading = None
                    self.note_duplicate(node)

    # ---- from the host

    def load_back(self, match: Match) -> int:
        """Copy a match's host pages to the device; return how many, or 0 where they are few or find no room."""
        cache, best = self._cache, match.best
        nodes = [node for node in cache.tree.path_up(best) if not node.on_device]
        nodes.reverse()
        pages = sum(len(node.pages) for node in nodes)
        if pages * cache.page_size < LOAD_BACK_TOKENS:
            return 0
        load = Transfer(best, [best])
        best.host_locks.append(load)
        cache.lock(best)
        if pages > cache.free:
            cache.evict((pages if self._hiradix else pages - cache.free) * cache.page_size)
        cache.unlock(best)
        if pages > cache.free:
            self._unlock_host(load)
            return 0
        cache.take(pages)
        for node in nodes:
            if self.write_policy == "write_back":
                node.loading = load
            cache.tree.set_device(node, present=True)
            cache.tell_loaded(node)
        cache.lock(best)
        self._loads.append(load)
        return pages

    # ---- evictions

    def evict(self, pages: int) -> int:
        """Free pages: with write-back, copies of what the device has too; then host leaves, used longest ago first."""
        freed = self._reclaim(pages) if self.write_policy == "write_back" and not self._hiradix else 0
        leaves = self._cache.tree.host_leaves
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
        self._cache.tell_host(node, stored=False)
        self.free += len(node.pages)
        self._duplicates.pop(node.number, None)
        node.on_host = False
        self._cache.tree.remove(node)
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
                if spared and node in self._cache.tree.device_leaves:
                    continue
                if node.writing is not None or node.loading is not None or node.host_locks:
                    continue
                self._cache.tell_host(node, stored=False)
                self._cache.tree.set_host(node, present=False)
                self.free += len(node.pages)
                freed += len(node.pages)
                swept.append(node.number)
        for number in swept:
            self._duplicates.pop(number, None)
        return freed

    def _unlock_host(self, transfer: Transfer) -> None:
        for node in transfer.nodes:
            node.host_locks.remove(transfer)
            self._cache.tree.update(node)

    def _take(self, pages: int) -> bool:
        """Take free pages, evicting for them; return whether there were enough."""
        short = pages - self.free
        if short > 0 and self.evict(short) < short:
            return False
        self.free -= pages
        return True
