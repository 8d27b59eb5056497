"""What decoders conclude from an engine's message, before our own hashes and residency enter."""

import enum
from collections.abc import Sequence

import msgspec

from schemas.profiles import Group, Tier

EngineHash = int | bytes
"""What an engine calls a block: an unsigned 64-bit pattern, or a longer name kept whole."""

_U64 = (1 << 64) - 1


class MediaKey(msgspec.Struct, frozen=True, array_like=True):
    """A picture, sound or embedding that a block overlaps."""

    id: str
    offset: int  # of its first token relative to the block's; negative where it began earlier


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An engine holds blocks; fields say only what the event said."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None = None  # None: the first token is the prompt's first
    tokens: Sequence[int] = ()  # of the whole range, which may be longer than `hashes` says; empty: hashes only
    block_size: int = 0  # tokens; 0: hashes only
    tier: Tier = "gpu"
    group: int = 0
    group_spec: Group | None = None  # where the event describes its group
    adapter: str | None = None
    salt: str | None = None  # known only for a block that starts a prompt
    namespace_known: bool = True  # False: an adapter that cannot be named; then tokens may be left out
    media: tuple[tuple[MediaKey, ...], ...] = ()  # one per hash; empty: no block has any
    pairs: bool = False  # tokens hold one more than blocks x block_size
    parent_known: bool = True  # False: the event does not say what precedes the first block
    names_chunks: bool = False  # each hash names a whole retrieval unit of its tier, not one of its blocks
    only_known: bool = False  # says nothing of namespaces: placed only where another event has placed these tokens

    @property
    def masked(self) -> bool:
        """Return whether some blocks of the range have no hash here."""
        whole = len(self.tokens) - (1 if self.pairs else 0)
        return bool(self.tokens) and whole != len(self.hashes) * self.block_size


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """An engine dropped one copy of each of these blocks."""

    hashes: tuple[EngineHash, ...]
    tier: Tier = "gpu"
    group: int = 0
    remaining: tuple[int, ...] | None = None  # copies left of each, where the dialect says so
    names_chunks: bool = False


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of each of these blocks went from one tier to another; it was never gone."""

    hashes: tuple[EngineHash, ...]
    before: Tier
    tier: Tier
    group: int = 0


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """An engine reset its cache; which tier is the profile's to say unless the event does."""

    tier: Tier | None = None


EngineEvent = Stored | Removed | Moved | Cleared


class RejectReason(enum.StrEnum):
    """Why one event of a message was refused; the value is the metric label."""

    UNKNOWN_EVENT = "unknown_event"
    MALFORMED = "malformed"
    BLOCK_SIZE = "block_size"
    TOKEN_COUNT = "token_count"
    TOKEN_RANGE = "token_range"
    HASH = "hash"
    GROUP = "group"
    GROUP_KIND = "group_kind"
    EXTRA_KEYS = "extra_keys"
    LIMIT = "limit"
    LOCALITY = "locality"
    OTHER_SOURCE = "other_source"


class Reject(msgspec.Struct, frozen=True):
    """One refused event and where it stood."""

    reason: RejectReason
    position: int  # in the batch
    detail: str  # names field and value; never token ids or salts


class Decoded(msgspec.Struct, frozen=True):
    """All that a decoder concluded from one message."""

    sequence: int
    time_s: float  # the engine's clock, epoch
    rank: int | None
    events: tuple[EngineEvent, ...]
    rejects: tuple[Reject, ...] = ()


def normalize_hash(value: EngineHash, bits: int) -> EngineHash:
    """Return the hash as a u64 pattern, or whole where its name is longer than the profile's `bits`.

    -5 and 2^64 - 5 are one hash. A longer name is cut to its low 64 bits only where the profile says that this
    engine's other events carry those (vLLM 0.14-0.23 offload events: engines/vllm-events.md 4.6).
    """
    if isinstance(value, int):
        return value & _U64
    if bits == 64:
        return int.from_bytes(value[-8:], "big")
    return value
