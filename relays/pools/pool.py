"""A pool as its relay sees it: which blocks a store holds, and where they stand on our chains; pure.

A store names blocks by engine hash; the replicas that read it publish those names beside our hashes (DESIGN 6). One
holder a model. Names agree only where algorithm, seed and bits of replica and pool do; elsewhere nothing is joined.
"""

from collections.abc import Iterable, Set

from index.hashing import unpack_hashes
from relays.cache.block_table import Limits
from relays.engine_events import EngineEvent, EngineHash, Stored
from relays.holder import MirroredHolder
from relays.mirror import Mirror
from relays.pools.past import Told
from schemas.events import BAND_BLOCKS, BlocksStored, HolderState, ProfileChanged, Record
from schemas.profiles import Holder, Profile, join_mismatch


class PoolModel(MirroredHolder):
    """One model's part of a pool."""

    def __init__(self, profile: Profile, life: int, *, secret: bytes = b"", limits: Limits | None = None) -> None:
        super().__init__(Holder(profile.name, None), Mirror(profile, secret=secret, limits=limits), life)
        self.mismatched: dict[str, str] = {}  # replicas whose names cannot be joined, and why
        self._readers: set[str] = set()

    def read_profile(self, profile: Profile) -> None:
        """Take in what a replica's relay says of it."""
        uses = [pool for pool in profile.pools if pool.name == self.holder.name]
        self._readers.discard(profile.name)
        self.mismatched.pop(profile.name, None)
        if not uses:
            return
        reason = join_mismatch(self.mirror.profile, profile)
        if not reason and not profile.tells_engine_hashes:
            reason = "named_by: tokens, and this store names blocks by engine hash"
        if reason:
            self.mismatched[profile.name] = reason
        else:
            self._readers.add(profile.name)

    def learn(self, record: Record) -> None:
        """Take in a record of a replica that reads this pool: where its engine's hashes stand."""
        for event in record.events:
            if isinstance(event, ProfileChanged):
                self.read_profile(event.profile)
            elif isinstance(event, BlocksStored) and event.engine_hashes and record.name in self._readers:
                before = event.depth_blocks % BAND_BLOCKS * 8
                path = unpack_hashes(record.paths[event.path][:before]) if before else []
                self.mirror.learn_places(
                    event.depth_blocks, path, unpack_hashes(event.blocks), unpack_hashes(event.engine_hashes)
                )

    def apply(self, events: Iterable[EngineEvent], source: str, sequence: int, time_s: float, now_s: float) -> None:
        """Apply one message of a publisher."""
        self.received[source] = sequence
        self.time_s = time_s
        self.mirror.apply(events, now_s)

    def restore(self, told: Told, heard: Set[EngineHash], now_s: float) -> int:
        """Take in what an earlier run had told, but for what this one has heard of; return how many blocks.

        Only blocks whose names are known come back: another could never be removed. Their age begins anew.
        """
        if not _alike(told.profile, self.mirror.profile):
            return 0
        restored: set[EngineHash] = set()
        for number, pair in enumerate(told.profile.pairs):
            blocks = [block for block, residency in told.blocks.items() if residency >> number & 1]
            names = tuple(name for name in self.mirror.names_of(blocks) if name not in heard)
            groups = [group.index for group in told.profile.groups if group.group_class == pair.group_class]
            self.mirror.apply(
                [Stored(hashes=names, tier=pair.tier, group=group, names_chunks=True) for group in groups], now_s
            )
            restored.update(names)
        self.received = told.received | self.received
        return len(restored)

    def begin_life(self, life: int) -> None:
        """Forget what the pool has; places that were learnt stay."""
        self.mirror.drop_copies()
        self.received = {}
        self.say_again(life)

    def beat(self, state: HolderState, *, share_known: float = 1.0, reason: str = "") -> Record:
        """Return a heartbeat, which names the replicas that cannot be joined."""
        parts = [reason, *(f"{name}: {why}" for name, why in sorted(self.mismatched.items())[:_MOST_NAMED])]
        more = len(self.mismatched) - _MOST_NAMED
        parts.append(f"{more} replicas more" if more > 0 else "")
        return super().beat(state, share_known=share_known, reason="; ".join(part for part in parts if part))


_MOST_NAMED = 20  # replicas in one heartbeat's reason


def _alike(before: Profile, now: Profile) -> bool:
    """Return whether an earlier run's residency means the same here."""
    return (before.dialect, before.unit, before.groups, before.tiers, before.hash) == (
        now.dialect,
        now.unit,
        now.groups,
        now.tiers,
        now.hash,
    )
