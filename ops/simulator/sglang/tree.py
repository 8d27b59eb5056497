"""SGLang's radix tree of pages: matching, splitting, recency and locks; what is where is its owner's to decide; pure.

Source: mem_cache/radix_cache.py of the 0.5.18 wheel and mem_cache/unified_cache/unified_tree_core.py of 0.5.23, whose
order of recency is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ops.simulator.sglang.pages import PLAIN, Hasher, Key, Namespace, Page


class Transfer:
    """A copy between device and host that is under way; its nodes are told about, and let go of, when it ends."""

    __slots__ = ("anchor", "nodes")

    def __init__(self, anchor: "Node", nodes: Iterable["Node"]) -> None:
        self.anchor = anchor
        self.nodes = list(nodes)  # root side first


class Node:
    """A run of pages without a branch inside; all of them are in the same tiers."""

    __slots__ = (
        "children",
        "digests",
        "hits",
        "host_locks",
        "loading",
        "locks",
        "namespace",
        "number",
        "on_device",
        "on_host",
        "pages",
        "parent",
        "used",
        "writing",
    )

    def __init__(self, number: int, parent: "Node | None", namespace: Namespace, pages: list[Page]) -> None:
        self.number = number
        self.parent = parent
        self.namespace = namespace
        self.pages = pages
        self.digests: list[bytes] = []
        self.children: dict[tuple[Namespace, Page], Node] = {}
        self.on_device = False
        self.on_host = False
        self.locks = 0  # of the device copy, by requests and transfers
        self.host_locks: list[Transfer] = []
        self.used = 0  # when it was last; unique
        self.hits = 0
        self.writing: Transfer | None = None  # to the host
        self.loading: Transfer | None = None  # from the host, where that keeps the host copy (write-back)

    @property
    def before(self) -> bytes | None:
        """Return the digest of the page before the node's first; None: it begins a prompt."""
        return self.parent.digests[-1] if self.parent is not None and self.parent.digests else None


class Match(NamedTuple):
    """What of a key is in the tree."""

    device: Node  # the deepest node with a device copy
    best: Node  # the deepest node with any copy
    device_pages: int
    host_pages: int  # behind them


class Tree:
    """The nodes, which of them can be evicted, and how much of the device that would free."""

    def __init__(self, hasher: Hasher) -> None:
        self.device_leaves: set[Node] = set()
        self.host_leaves: set[Node] = set()
        self.evictable_pages = 0  # on the device and not locked
        self._hasher = hasher
        self._clock = 0
        self._numbers = 0
        self.root = self._new(None, PLAIN, [])

    # ---- walks

    def match(self, key: Key) -> Match:
        """Return the longest prefix of the key that is here, which is used now; a node it ends in is split."""
        node, at, path = self.root, 0, [self.root]
        device, device_pages, pages = self.root, 0, 0
        while (child := self.child(node, key, at)) is not None and (child.on_device or child.on_host):
            common = self.common(child, key, at)
            node = self.split(child, common) if common < len(child.pages) else child
            path.append(node)
            pages += common
            at += common
            if node.on_device:
                device, device_pages = node, device_pages + common
            if node is not child:
                break
        for passed in path:
            self.touch(passed)
        return Match(device, node, device_pages, pages - device_pages)

    def child(self, node: Node, key: Key, at: int) -> Node | None:
        """Return the node that goes on with the key's page at that position."""
        return node.children.get((key.namespace, key.pages[at])) if at < len(key.pages) else None

    def common(self, node: Node, key: Key, at: int) -> int:
        """Return how many of the node's pages the key has from that position on."""
        length = min(len(node.pages), len(key.pages) - at)
        return next((n for n in range(length) if node.pages[n] != key.pages[at + n]), length)

    def touch(self, node: Node) -> None:
        """Let a node be used now."""
        self._clock += 1
        node.used = self._clock

    # ---- shape

    def add(self, parent: Node, namespace: Namespace, pages: list[Page]) -> Node:
        """Return a new leaf, which is in no tier yet."""
        node = self._new(parent, namespace, pages)
        node.digests = self._hasher.chain(namespace, node.before, pages)
        parent.children[namespace, pages[0]] = node
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut a node; return its first part, which is new and above it. Both stay as they were in all else."""
        parent = node.parent
        assert parent is not None  # the root has no pages to cut
        front = self._new(parent, node.namespace, node.pages[:pages])
        front.digests = node.digests[:pages]
        front.on_device, front.on_host, front.hits = node.on_device, node.on_host, node.hits
        front.locks, front.host_locks = node.locks, list(node.host_locks)
        front.writing, front.loading = node.writing, node.loading
        for transfer in [*front.host_locks, *filter(None, (front.writing,))]:
            transfer.nodes.insert(transfer.nodes.index(node), front)
        parent.children[node.namespace, node.pages[0]] = front
        node.pages, node.digests = node.pages[pages:], node.digests[pages:]
        node.parent = front
        front.children[node.namespace, node.pages[0]] = node
        self.touch(node)
        self.update(front)
        self.update(node)
        return front

    def remove(self, node: Node) -> None:
        """Take a leaf out; its parent may be one now."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.namespace, node.pages[0]]
        self.device_leaves.discard(node)
        self.host_leaves.discard(node)
        self.update(node.parent)

    def set_device(self, node: Node, *, present: bool) -> None:
        """Note that a node's device copy came or went."""
        node.on_device = present
        if not node.locks:
            self.evictable_pages += len(node.pages) if present else -len(node.pages)
        self._update_around(node)

    def set_host(self, node: Node, *, present: bool) -> None:
        """Note that a node's host copy came or went."""
        node.on_host = present
        self._update_around(node)

    # ---- locks

    def lock(self, node: Node) -> None:
        """Keep a node and all above it on the device."""
        for part in self.path_up(node):
            part.locks += 1
            if part.locks == 1:
                self.evictable_pages -= len(part.pages) * part.on_device
            self.update(part)

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        for part in self.path_up(node):
            part.locks -= 1
            if not part.locks:
                self.evictable_pages += len(part.pages) * part.on_device
            self.update(part)

    def path_up(self, node: Node) -> Iterator[Node]:
        """Yield a node and those above it, the root left out."""
        while node.parent is not None:
            yield node
            node = node.parent

    def update(self, node: Node) -> None:
        """Decide anew whether a node can be evicted from each tier."""
        if node.parent is None:
            return
        on_device_below = any(child.on_device for child in node.children.values())
        _keep(self.device_leaves, node, node.on_device and not node.locks and not on_device_below)
        alone = not node.on_device and not node.children and not node.locks and not node.host_locks
        _keep(self.host_leaves, node, node.on_host and alone)

    def table(self) -> Iterator[Node]:
        """Yield all nodes but the root."""
        left: Sequence[Node] = list(self.root.children.values())
        while left:
            yield from left
            left = [child for node in left for child in node.children.values()]

    def _update_around(self, node: Node) -> None:
        self.update(node)
        if node.parent is not None:
            self.update(node.parent)

    def _new(self, parent: Node | None, namespace: Namespace, pages: list[Page]) -> Node:
        self._numbers += 1
        node = Node(self._numbers, parent, namespace, pages)
        self.touch(node)
        return node


def _keep(leaves: set[Node], node: Node, wanted: bool) -> None:
    if wanted:
        leaves.add(node)
    else:
        leaves.discard(node)
