"""The one normalized event family: what relays write to `kv.events.<model>` and nothing engine-specific passes.

msgpack arrays through msgspec; new fields go to the tail, with defaults. Events carry states, not deltas, so
applying a record twice ends right; the fence (`sequence`, per life, contiguous from 1) keeps the order.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from schemas.errors import FrameError, ProfileError
from schemas.profiles import Holder, Profile, is_name

SCHEMA_VERSION = 1
MAX_NUMBER = 1 << 53  # lives and sequences; Lua's numbers are doubles
BAND_BLOCKS = 128
"""Depth at which the index cuts a chain; a record's path never reaches further back (DESIGN 6 and 7)."""
BAND_BYTES = BAND_BLOCKS * 8  # of its packed hashes
MAX_RECORD_BYTES = 1_000_000  # Kafka's default limit is 1 MiB, headers and batch overhead included

HolderState = Literal["live", "catching_up", "stale", "unknown", "silent", "gone"]
"""What a relay says of its source; readers say `stale` and `unknown` themselves where no relay speaks."""


class BlocksStored(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="stored"):
    """A run of blocks and the residency that each of them now has."""

    depth_blocks: int  # of the first block; 0: the chain starts here
    path: int  # position in the record's `paths`; its first depth % 128 hashes lead up to the run
    blocks: bytes  # u64 each, prompt order
    residency: int  # bits of the profile's (group class, tier) pairs, never 0
    engine_hashes: bytes | None = None  # u64 each, parallel to `blocks`, where a pool is named by them


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="removed"):
    """A run of blocks that the holder no longer has in any tier."""

    depth_blocks: int
    path: int
    blocks: bytes


class HolderCleared(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="cleared"):
    """The holder has nothing any more, in no tier: a new epoch begins here."""


class Heartbeat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="alive"):
    """The relay lives; it takes no sequence of its own and is never fenced as a repeat."""

    state: HolderState
    received: dict[str, int]  # source -> last engine sequence that reached the relay
    share_known: float = 1.0  # of the cache, while catching up
    reason: str = ""


class ProfileChanged(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """The facts that hold for this record's events and all later ones."""

    profile: Profile


BlockEvent = BlocksStored | BlocksRemoved | HolderCleared | Heartbeat | ProfileChanged


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One Kafka record: what changed on one holder, in order.

    `paths` are packed u64 hashes, each starting at a depth that is a multiple of 128 (at most 127 of them), shared
    by the runs that name them.
    """

    version: int
    name: str
    rank: int | None
    life: int  # lives of a holder are ordered
    sequence: int
    engine_sequence: dict[str, int]  # source -> last engine sequence that these events complete
    engine_time_s: float
    paths: tuple[bytes, ...]
    events: tuple[BlockEvent, ...]

    @property
    def holder(self) -> Holder:
        """Return whose blocks these are."""
        return Holder(self.name, self.rank)


_MAX_SOURCE_BYTES = 200
_MAX_SOURCES = 200
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Return the record's bytes."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Return the record; runs and paths are whole and within their bounds.

    Raises:
        FrameError: `record_malformed`, `record_version` or `record_bounds`, with the place.
    """
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise FrameError("record_malformed", str(error)) from error
    if record.version != SCHEMA_VERSION:
        raise FrameError("record_version", f"version {record.version}, expected {SCHEMA_VERSION}")
    _check_head(record)
    for position, event in enumerate(record.events):
        if isinstance(event, BlocksStored | BlocksRemoved):
            _check_run(record, position, event)
        elif isinstance(event, ProfileChanged):
            _check_profile(position, event.profile)
        elif isinstance(event, Heartbeat):
            _check_sources(f"events[{position}].received", event.received)
    return record


def _check_head(record: Record) -> None:
    """Refuse what a store cannot pack, or what its numbers cannot hold."""
    for field in ("life", "sequence"):
        if not 0 <= getattr(record, field) <= MAX_NUMBER:
            raise FrameError("record_bounds", f"{field}: {getattr(record, field)}")
    if not is_name(record.name):
        raise FrameError("record_bounds", f"name: {record.name[:80]!r}, {len(record.name)} characters")
    if record.rank is not None and not 0 <= record.rank < 1 << 16:
        raise FrameError("record_bounds", f"rank: {record.rank}")
    _check_sources("engine_sequence", record.engine_sequence)
    for position, path in enumerate(record.paths):
        if len(path) % 8 or len(path) >= BAND_BYTES:
            raise FrameError("record_bounds", f"paths[{position}]: {len(path)} bytes")


def _check_sources(place: str, sequences: Mapping[str, int]) -> None:
    if len(sequences) > _MAX_SOURCES:
        raise FrameError("record_bounds", f"{place}: {len(sequences)} sources")
    for source, sequence in sequences.items():
        if len(source.encode()) > _MAX_SOURCE_BYTES or "\0" in source or not 0 <= sequence <= MAX_NUMBER:
            raise FrameError("record_bounds", f"{place}[{source[:80]!r}]: {sequence}")


def _check_profile(position: int, profile: Profile) -> None:
    try:
        profile.check()
    except ProfileError as error:
        raise FrameError("record_bounds", f"events[{position}].profile: {error}") from error


def _check_run(record: Record, position: int, run: BlocksStored | BlocksRemoved) -> None:
    if not run.blocks or len(run.blocks) % 8:
        raise FrameError("record_bounds", f"events[{position}].blocks: {len(run.blocks)} bytes")
    if not 0 <= run.depth_blocks < 1 << 31:
        raise FrameError("record_bounds", f"events[{position}].depth_blocks: {run.depth_blocks}")
    needed = run.depth_blocks % BAND_BLOCKS * 8
    if needed and not (0 <= run.path < len(record.paths) and len(record.paths[run.path]) >= needed):
        raise FrameError("record_bounds", f"events[{position}].path: {run.path} does not lead to {run.depth_blocks}")
    if isinstance(run, BlocksRemoved):
        return
    if not 0 < run.residency < 1 << 16:
        raise FrameError("record_bounds", f"events[{position}].residency: {run.residency}")
    if run.engine_hashes is not None and len(run.engine_hashes) != len(run.blocks):
        raise FrameError("record_bounds", f"events[{position}].engine_hashes: {len(run.engine_hashes)} bytes")
