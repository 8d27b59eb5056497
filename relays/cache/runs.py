"""Changed blocks as runs along their chains; pure."""

from collections.abc import Iterable

import msgspec

from relays.cache.block_table import Node
from schemas.events import BAND_BLOCKS


class Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of one chain that changed to the same residency; 0: gone."""

    nodes: list[Node]
    residency: int

    @property
    def head(self) -> Node:
        """Return the run's first block."""
        return self.nodes[0]


def runs_of(changes: Iterable[tuple[Node, int]]) -> list[Run]:
    """Return blocks and their new residencies as runs, shallow ones first."""
    runs: list[Run] = []
    open_runs: dict[int, Run] = {}  # by the hash of the run's last block
    for node, residency in sorted(changes, key=lambda change: change[0].depth):
        run = open_runs.pop(node.parent.hash, None) if node.parent else None
        if run is None or run.residency != residency:
            run = Run([], residency)
            runs.append(run)
        run.nodes.append(node)
        open_runs[node.hash] = run
    return runs


def path_of(node: Node) -> list[int]:
    """Return the hashes from the first block of the node's band up to its parent, root side first."""
    path: list[int] = []
    current = node.parent
    for _ in range(node.depth % BAND_BLOCKS):
        assert current is not None  # depth counts the ancestors
        path.append(current.hash)
        current = current.parent
    path.reverse()
    return path
