"""Profiles: what the rules need to know about a holder and its events do not say (topic `kv.replicas`)."""

from typing import Annotated, Literal, NamedTuple

import msgspec

from schemas.errors import ProfileError

Tier = Literal["gpu", "host", "disk", "pool", "other"]
TIERS: tuple[Tier, ...] = ("gpu", "host", "disk", "pool", "other")
"""Fastest first; a medium that nobody knows is `other`: counted, never taken for GPU."""

GroupKind = Literal["full", "window", "state"]
MAX_SIZE = 1 << 24
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
"""Of a block or a chunk."""
Window = Annotated[int, msgspec.Meta(ge=1)]
MAX_NAME_BYTES = 1024
MAX_PAIRS = 16
"""Residency has two bytes, one bit a (group class, tier) pair."""


class Holder(NamedTuple):
    """Whatever holds blocks: a rank of a replica, or (rank None) a pool."""

    name: str
    rank: int | None

    def __str__(self) -> str:
        return self.name if self.rank is None else f"{self.name}/{self.rank}"


def is_name(text: str) -> bool:
    """Return whether a model, a replica or a pool can have this name: stores pack it beside others."""
    return 0 < len(text.encode()) <= MAX_NAME_BYTES and "\n" not in text and "\0" not in text


class GroupClass(NamedTuple):
    """Cache groups that are found and lost by one rule."""

    kind: GroupKind
    window: Window | None  # tokens
    block_size: Size  # tokens


class Group(msgspec.Struct, frozen=True):
    """One KV cache group of an engine; a plain model has a single full one."""

    index: int
    kind: GroupKind
    block_size: Size  # tokens
    window: Window | None = None  # tokens, for kind `window`

    @property
    def group_class(self) -> GroupClass:
        """Return the class whose groups are ANDed with this one."""
        return GroupClass(self.kind, self.window, self.block_size)


class TierProfile(msgspec.Struct, frozen=True):
    """How one tier of a holder behaves."""

    name: Tier
    chunk: Size = 1  # retrieval unit, in blocks of the unit; a partial chunk earns nothing
    capacity: int | None = None  # chunks
    removals: bool = True  # False: the source never announces them
    # whether a load may cover the prompt's last token, and whether the engine then counts it as cached
    last_token: Literal["never", "uncounted", "counted"] = "never"
    least_tokens: int = 0  # of a load; what is less is computed again
    drafting: bool = False  # a draft model takes the last chunk that is found here too, as it does on the device


class Pair(NamedTuple):
    """What one bit of a residency means."""

    group_class: GroupClass
    tier: Tier


class PoolUse(msgspec.Struct, frozen=True):
    """A pool that a replica reads."""

    name: str
    named_by: Literal["tokens", "engine_hash"] = "engine_hash"  # what the pool's own events name blocks by
    tiers: tuple[Tier, ...] = ("host", "disk")  # of the pool, that this replica reads


class HashScheme(msgspec.Struct, frozen=True):
    """How the engine names its blocks, as far as an operator can know it."""

    algorithm: str = "sha256"
    seed: str | None = None  # None: unknown, or random for each process
    bits: int = 64  # what its events carry; longer names are kept whole


class Rank(msgspec.Struct, frozen=True):
    """Where one data-parallel rank publishes."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a replica (or pool) that its events leave out.

    Written by the holder's relay from its configuration and the dialect's table. `pairs` is the meaning of the
    residency bits and is only ever appended to within an epoch.
    """

    model: str
    name: str  # of the replica or pool
    engine: str
    version: str
    dialect: str
    # tokens of one index block: the finest size at which this cache can be hit; 0: not learnt yet
    unit: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
    alignment: Annotated[int, msgspec.Meta(ge=0)]  # a hit is a multiple of this many tokens; 0: of all blocks
    drafting: Literal["none", "drop_unit", "drop_unit_ahead", "pairs"] = "none"
    groups: tuple[Group, ...] = ()
    pairs: Annotated[tuple[Pair, ...], msgspec.Meta(max_length=MAX_PAIRS)] = ()
    tiers: Annotated[tuple[TierProfile, ...], msgspec.Meta(min_length=1)] = (TierProfile("gpu"),)
    tier_walk: Literal["mixed", "device_then_lower"] = "mixed"
    removal: Literal["per_copy", "one_for_copies", "one_for_all_tiers"] = "per_copy"
    re_announces_hits: bool = False  # a store may repeat a copy that was announced before
    hash_only_stores: bool = False  # a tier names blocks without tokens or parent
    cascade: bool = False  # a removal ends the blocks below it too, unlisted
    clear_scope: Literal["all", "device", "device_then_host"] = "all"
    replay: Literal["ring", "none"] = "ring"
    hash: HashScheme = HashScheme()
    adapters: dict[str, str] = {}  # id of an adapter -> its name
    placeholders: tuple[int, ...] = ()  # tokens that stand for media, where events may not name these
    lmcache: Literal["none", "in_process", "mp"] = "none"  # whose events are mixed into a vLLM's stream
    hidden_namespaces: tuple[Literal["salt", "adapter", "adapter_path", "extra_key"], ...] = ()
    marks: tuple[str, ...] = ()  # said in the reasons of every answer that credits this holder
    rank_selectable: bool = True
    upper_bound_policy: Literal["credit", "gone"] = "credit"
    upper_bound: bool = False  # its engine does not report every group class
    window_sizes: tuple[int, ...] = ()  # tokens, largest first, where each announces its own copy; only it is credited
    ranks: tuple[Rank, ...] = ()
    pools: tuple[PoolUse, ...] = ()  # that this replica reads
    lookup_from_start: bool = False  # LMCache, as a pool or inside vLLM: whatever the device has of a prompt
    max_age_s: float | None = None  # of copies that nothing may ever remove; twice as fast while a gap is open

    def ages(self, name: Tier) -> bool:
        """Return whether copies in a tier are forgotten after `max_age_s`: no removal may ever end them."""
        return self.max_age_s is not None and (self.replay == "none" or not self.tier(name).removals)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Return who holds blocks: the ranks of a replica, or a pool."""
        return tuple(Holder(self.name, rank.rank) for rank in self.ranks) or (Holder(self.name, None),)

    @property
    def tells_engine_hashes(self) -> bool:
        """Return whether a pool needs to know what the engine calls its blocks."""
        return any(pool.named_by == "engine_hash" for pool in self.pools)

    def tier(self, name: Tier) -> TierProfile:
        """Return how the tier behaves; one that is not listed behaves plainly."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        return TierProfile(name)

    def check(self) -> None:
        """Raise ProfileError, naming the class, where its groups or residency bits are of none that a hit rule has."""
        for known in {*(group.group_class for group in self.groups), *(pair.group_class for pair in self.pairs)}:
            if (known.window is None) is (known.kind == "window"):
                raise ProfileError(f"{known}: only the kind `window` has a window")
            if self.unit and known.block_size % self.unit:
                raise ProfileError(f"{known}: not a multiple of the unit {self.unit}")


def class_bits(pairs: tuple[Pair, ...]) -> dict[GroupClass, dict[Tier, int]]:
    """Return for each group class the residency bit of each of its tiers."""
    bits: dict[GroupClass, dict[Tier, int]] = {}
    for position, pair in enumerate(pairs):
        bits.setdefault(pair.group_class, {})[pair.tier] = 1 << position
    return bits


def join_mismatch(pool: Profile, replica: Profile) -> str:
    """Return why a pool's blocks are not those that a replica's engine looks for there, or an empty text.

    A pool whose events bring tokens has no such reason. One that names blocks by engine hash is found only by engines
    that make the same names: of the same algorithm and seed, over blocks of the same size.
    """
    if not pool.hash_only_stores:
        return ""
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


class ReplicaEntry(msgspec.Struct, frozen=True):
    """The value of `kv.replicas`, by the name of the replica, or pool@model: its newest profile and life."""

    life: int  # the highest of its holders
    profile: Profile


_entry_decoder = msgspec.json.Decoder(ReplicaEntry)


def encode_entry(entry: ReplicaEntry) -> bytes:
    """Return the entry as JSON, which an operator can read on the topic."""
    return msgspec.json.encode(entry)


def decode_entry(data: bytes) -> ReplicaEntry:
    """Return the entry.

    Raises:
        ProfileError: the bytes are no entry.
    """
    try:
        entry = _entry_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(f"kv.replicas: {error}") from error
    entry.profile.check()
    return entry
