"""What a store of the index promises; the memory store is the reference, Redis the one that serves."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from index.fold import Flush
from index.match import Run
from schemas.events import Heartbeat, HolderState
from schemas.profiles import Holder, Profile

REBUILDING = "rebuilding"
"""Why a holder is unknown of whose last records the index is far away."""

UNHEARD = Heartbeat("unknown", {}, 0.0, REBUILDING)
"""What stands in for the heartbeat of a holder that is expected."""

NOBODY: Mapping[Holder, Profile] = MappingProxyType({})


class Applied(msgspec.Struct):
    """What became of a flush; counts of writes."""

    applied: int = 0
    repeated: int = 0  # at or below the fence
    refused: int = 0  # of a life that is over
    gaps: int = 0  # holders found to have lost records

    def add(self, other: "Applied") -> None:
        """Add another flush's counts."""
        self.applied += other.applied
        self.repeated += other.repeated
        self.refused += other.refused
        self.gaps += other.gaps


class HolderRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of one holder, without judging it."""

    holder: Holder
    life: int  # 0: expected, and not heard since the store is empty
    epoch: int
    sequence: int  # last record applied
    broken: bool  # records were lost; what is known may be wrong until a new life
    applied: dict[str, int]  # source -> last engine sequence applied
    profile: Profile | None = None
    received: dict[str, int] = {}  # source -> last engine sequence that reached the relay
    state: HolderState = "silent"  # what its relay said last
    share_known: float = 1.0
    reason: str = ""
    age_s: float | None = None  # since the last heartbeat, by the store's clock; None: none yet


class Found(msgspec.Struct, frozen=True):
    """Where a chain's blocks are."""

    runs: Mapping[Holder, Sequence[Run]]  # in chain order; holders without any are left out


class Store(Protocol):
    """The index of the models; every method raises StaleIndex once the store lost its data."""

    async def setup(self, model: str, expected: Mapping[Holder, Profile] = NOBODY) -> bool:
        """Make the model's incarnation if there is none; return whether it was made now (the store is empty).

        Args:
            expected: who will be heard again; in an empty store they are `unknown: rebuilding` until then, so that
                it does not look like an empty fleet.
        """

    async def apply(self, flush: Flush) -> Applied:
        """Apply data, fences and cursor in one step; a write at or below its holder's fence changes nothing.

        A heartbeat that names a record of a life which was never seen begins that life: what was known is over, and
        what its relay has said since is lost. One that names none is not heard: its relay may be about to go on.
        """

    async def find(self, model: str, chain: bytes, *, gap: int = 0) -> Found:
        """Return where the blocks of a chain (packed u64, from depth 0) are.

        Runs are complete up to the first stretch of more than `gap` blocks that nobody holds.
        """

    async def holders(self, model: str) -> list[HolderRow]:
        """Return every holder of the model that has not been forgotten."""

    async def cursors(self, model: str) -> dict[tuple[str, int], int]:
        """Return (topic id, partition) -> next offset to read."""

    async def digest(self, model: str, holder: Holder) -> int:
        """Return XXH3-64 over the holder's sorted (block_hash u64, residency u16), little-endian; no hurry."""
