"""SGLang's prefix cache on the device: pages, requests' locks, inserts and evictions; the host tier hangs behind; pure.

Source: mem_cache/radix_cache.py of the 0.5.10.post1 and 0.5.18 wheels, mem_cache/unified_radix_cache.py and
unified_cache/unified_tree_core.py of 0.5.23; allocation: mem_cache/common.py and allocation.py.
"""

import heapq
from typing import NamedTuple

from ops.simulator.sglang.dialect import Dialect
from ops.simulator.sglang.events import GPU, Recorder
from ops.simulator.sglang.host import HostTier, WritePolicy
from ops.simulator.sglang.pages import Key
from ops.simulator.sglang.tree import Match, Node, Tree
from schemas.sglang import Event

LOAD_BACK_TOKENS = 10
"""A shorter run of host pages is computed again (`load_back_threshold` of hiradix_cache.py)."""


class Inserted(NamedTuple):
    """What became of the pages that a request computed."""

    node: Node  # where the key ends
    duplicates: int  # pages that were there already: the request's own are free again


class Cache:
    """The tree and both pools of one rank; amounts are pages unless their name says tokens."""

    def __init__(
        self,
        dialect: Dialect,
        page_size: int,
        pages: int,
        *,
        host_pages: int = 0,
        write_policy: WritePolicy = "write_through",
    ) -> None:
        self.page_size = page_size
        self.capacity = pages
        self._dialect = dialect
        self._host_pages = host_pages
        self._write_policy = write_policy
        self._recorder = Recorder(dialect, page_size)
        self._begin()

    # ---- what is there

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    @property
    def available(self) -> int:
        """Pages that are free or can be made so."""
        return self._free + self.tree.evictable_pages

    @property
    def unsettled(self) -> bool:
        """Return whether a step without requests would do something."""
        return self._recorder.pending or (self.host is not None and self.host.busy)

    def table(self, medium: str) -> list[int]:
        """Return the announced names of all pages in a tier, sorted, equal ones repeated."""
        nodes = (node for node in self.tree.table() if (node.on_device if medium == GPU else node.on_host))
        announced = self._recorder.hasher.announced
        return sorted(announced(node.namespace, digest) for node in nodes for digest in node.digests)

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        return self._recorder.take()

    # ---- requests

    def match(self, key: Key) -> Match:
        """Return what of a key is here; it is used now."""
        return self.tree.match(key)

    def lock(self, node: Node) -> None:
        """Keep a node and all above it on the device."""
        self.tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        self.tree.unlock(node)

    def load_back(self, match: Match) -> int:
        """Bring the host's part of a match back to the device; return its pages, 0 where few or without room."""
        host, tree, best = self.host, self.tree, match.best
        nodes = [node for node in tree.path_up(best) if not node.on_device]
        nodes.reverse()
        pages = sum(len(node.pages) for node in nodes)
        if host is None or pages * self.page_size < LOAD_BACK_TOKENS:
            return 0
        load = host.begin_load(best)
        tree.lock(best)
        if pages > self._free:
            self.evict((pages if self._dialect.hiradix else pages - self._free) * self.page_size)
        tree.unlock(best)
        if pages > self._free:
            host.let_go(load)
            return 0
        self.take(pages)
        host.load(load, nodes)
        return pages

    def settle(self) -> None:
        """Take note of the copies between device and host that were under way."""
        if self.host is not None:
            self.host.settle()

    def make_room(self, tokens: int) -> bool:
        """Evict until that many tokens are free; return whether they are."""
        short = tokens - self._free * self.page_size
        if short > 0:
            self.evict(tokens if self._dialect.whole_demand else short)
        return self._free * self.page_size >= tokens

    def take(self, pages: int) -> None:
        """Give free pages to a request.

        Raises:
            ValueError: fewer are free; the caller must have made room.
        """
        if pages > self._free:
            raise ValueError(f"{pages} pages asked for, {self._free} are free")
        self._free -= pages

    def give_back(self, pages: int) -> None:
        """Take pages back that a request held for itself."""
        self._free += pages

    def insert(self, key: Key, *, owned: int, counted: int) -> Inserted:
        """Let the tree have a request's computed pages.

        Args:
            owned: pages of the key that the tree owned already when the request took them over.
            counted: pages of the key that the same request inserted before; their nodes count no hit again.
        """
        tree, node, at, duplicates = self.tree, self.tree.root, 0, 0
        tree.touch(node)
        while (child := tree.child(node, key, at)) is not None:
            tree.touch(child)
            common = tree.common(child, key, at)
            node = tree.split(child, common) if common < len(child.pages) else child
            if node.on_device:
                duplicates += max(0, at + common - max(at, owned))
            else:  # evicted meanwhile, its host copy is not: what was computed takes its place
                tree.set_device(node, present=True)
                if self._dialect.host_events:
                    self._tell_stored(node)
                if self.host is not None:
                    self.host.note_duplicate(node)
            at += common
            self._count(node, at > counted)
        if at < len(key.pages):
            node = tree.add(node, key.namespace, key.pages[at:])
            tree.set_device(node, present=True)
            self._tell_stored(node)
            self._count(node, len(key.pages) > counted)
        self._free += duplicates
        return Inserted(node, duplicates)

    # ---- evictions

    def evict(self, tokens: int) -> int:
        """Evict leaves, those used longest ago first, until that many tokens are free; return how many are."""
        heap = [(node.used, node.number, node) for node in self.tree.device_leaves]
        heapq.heapify(heap)
        freed = 0
        while freed * self.page_size < tokens and heap:
            node = heapq.heappop(heap)[2]
            if node not in self.tree.device_leaves:
                continue
            parent = node.parent
            freed += self._evict_leaf(node)
            if parent is not None and parent in self.tree.device_leaves:
                heapq.heappush(heap, (parent.used, parent.number, parent))
        if self.host is not None:
            self.host.tell_written()
        return freed * self.page_size

    def reset(self) -> None:
        """Forget everything, and tell that; no request may hold anything."""
        self._begin()

    def _begin(self) -> None:
        self.tree = Tree(self._recorder.hasher)
        self._free = self.capacity
        self.host: HostTier | None = None
        if self._host_pages:
            self.host = HostTier(self.tree, self._recorder, self._dialect, self._write_policy, self._host_pages)
        self._recorder.cleared()

    def _evict_leaf(self, node: Node) -> int:
        """Free one leaf's device copy; return its pages, or 0 where it has to stay."""
        host = self.host
        if host is not None and host.write_policy == "write_back" and not node.on_host and not host.write_back(node):
            return self._drop_subtree(node)
        return self._demote(node) if node.on_host else self._delete(node)

    def _demote(self, node: Node) -> int:
        """Drop the device copy of a node that has a host copy."""
        self.tree.set_device(node, present=False)
        self._free += len(node.pages)
        if self._dialect.host_events:
            self._recorder.removed(node.namespace, node.digests, GPU)
        return len(node.pages)

    def _delete(self, node: Node) -> int:
        """Take a leaf without a host copy out of the tree."""
        self._recorder.removed(node.namespace, node.digests, GPU)
        self.tree.set_device(node, present=False)
        self._free += len(node.pages)
        self.tree.remove(node)
        return len(node.pages)

    def _drop_subtree(self, node: Node) -> int:
        """Delete a leaf that the host has no room for, with the host copies below it; 0 where one is in use."""
        assert self.host is not None
        self.host.tell_written()
        below: list[Node] = []
        left = list(node.children.values())
        while left:
            below.append(left.pop())
            left += below[-1].children.values()
        if any(part.locks or part.host_locks or part.writing or part.loading for part in (node, *below)):
            return 0
        for part in reversed(below):
            self.host.delete(part)
        return self._delete(node)

    # ---- telling

    def _tell_stored(self, node: Node) -> None:
        self._recorder.stored(node.namespace, node.before, node.pages, node.digests, GPU)

    def _count(self, node: Node, wanted: bool) -> None:
        if wanted and self.host is not None:
            self.host.count_hit(node)
