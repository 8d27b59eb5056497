"""A pool as its relay sees it: which blocks a store holds, and where they stand on our chains; pure.

A store names blocks by engine hash; the replicas that read it publish those names beside our hashes (DESIGN 6). One
holder a model. Names agree only where algorithm, seed and bits of replica and pool do; elsewhere nothing is joined.
"""

from collections.abc import Iterable, Iterator

from index.hashing import unpack_hashes
from relays.dialects import PoolSettings, pool_profile
from relays.engine_events import EngineEvent
from relays.mirror import Limits, Mirror
from relays.records import Voice
from schemas.events import BlocksStored, Heartbeat, HolderState, ProfileChanged, Record
from schemas.profiles import Holder, Profile


class PoolModel:
    """One model's part of a pool."""

    def __init__(
        self,
        model: str,
        name: str,
        kind: str,
        settings: PoolSettings,
        life: int,
        limits: Limits,
        *,
        secret: bytes = b"",
    ) -> None:
        self.model = model
        self.mismatched: dict[str, str] = {}  # replicas whose names cannot be joined, and why
        self.received: dict[str, int] = {}
        self.holder = Holder(name, None)
        self._readers: dict[str, Profile] = {}
        self.mirror = Mirror(pool_profile(kind, model, name, settings), secret=secret, limits=limits)
        self.voice = Voice(self.holder, life)

    def read_profile(self, profile: Profile) -> None:
        """Take in what a replica's relay says of it."""
        uses = [pool for pool in profile.pools if pool.name == self.holder.name and pool.named_by == "engine_hash"]
        self._readers.pop(profile.name, None)
        self.mismatched.pop(profile.name, None)
        if not uses:
            return
        reason = join_mismatch(self.mirror.profile, profile)
        if reason:
            self.mismatched[profile.name] = reason
        else:
            self._readers[profile.name] = profile

    def learn(self, record: Record) -> None:
        """Take in a record of a replica that reads this pool: where its engine's hashes stand."""
        for event in record.events:
            if isinstance(event, ProfileChanged):
                self.read_profile(event.profile)
            elif isinstance(event, BlocksStored) and event.engine_hashes and record.name in self._readers:
                before = event.depth_blocks % 128 * 8
                path = unpack_hashes(record.paths[event.path][:before]) if before else []
                self.mirror.learn_places(
                    event.depth_blocks, path, unpack_hashes(event.blocks), unpack_hashes(event.engine_hashes)
                )

    def apply(self, events: Iterable[EngineEvent], source: str, sequence: int, now_s: float) -> None:
        """Apply one message of a publisher."""
        self.received[source] = sequence
        self.mirror.apply(events, now_s)

    def expire(self, now_s: float, *, doubtful: bool) -> None:
        """Forget copies past their age, half of it while something may have been lost."""
        max_age_s = self.mirror.profile.max_age_s
        if max_age_s is not None:
            self.mirror.expire(now_s, max_age_s / 2 if doubtful else max_age_s)

    def begin_life(self, life: int, *, keep: bool) -> None:
        """Say everything again in a higher life, or begin with nothing; places that were learnt stay."""
        if keep:
            self.mirror.say_again()
        else:
            self.mirror.drop_copies()
            self.mirror.say_again()
            self.received = {}
        self.voice = Voice(self.holder, life)

    def speak(self, time_s: float) -> Iterator[Record]:
        """Yield the records that tell the index what is new."""
        return self.voice.speak(self.mirror, self.received, time_s)

    def beat(self, state: HolderState, reason: str, time_s: float) -> Record:
        """Return a heartbeat, which names the replicas that cannot be joined."""
        parts = [reason, *(f"{name}: {why}" for name, why in sorted(self.mismatched.items()))]
        return self.voice.beat(Heartbeat(state, dict(self.received), 1.0, "; ".join(p for p in parts if p)), time_s)


def join_mismatch(pool: Profile, replica: Profile) -> str:
    """Return why a replica's block names are not those of a pool that names blocks by them, or an empty text."""
    if replica.engine != "vllm":
        return f"hash_mismatch: {replica.engine} hashes blocks another way than this store's names"
    if pool.hash.seed is None or replica.hash.seed is None:
        return "hash_mismatch: the seed of pool or replica is not known"
    if (pool.hash.algorithm, pool.hash.seed) != (replica.hash.algorithm, replica.hash.seed):
        return (
            f"hash_mismatch: {replica.hash.algorithm} with seed {replica.hash.seed!r}, "
            f"the pool {pool.hash.algorithm} with {pool.hash.seed!r}"
        )
    if replica.unit and replica.unit != pool.unit:
        return f"block_size: {replica.unit}, the pool {pool.unit}"
    return ""
