"""The fold: records of one partition into writes that a store applies in one step; pure."""

from collections.abc import Iterable, Iterator

import msgspec

from schemas.events import (
    BAND_BLOCKS,
    BAND_BYTES,
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    HolderCleared,
    ProfileChanged,
    Record,
)
from schemas.profiles import Holder, Profile


class BandRun(msgspec.Struct, frozen=True, gc=False):
    """A run of blocks within one band of one chain, with all that leads up to it in the band."""

    first: int  # position of the run's first block in the band, 0..127
    chain: bytes  # u64 each: from the band's first block to the run's last
    residency: int  # 0: gone


class HolderWrite(msgspec.Struct):
    """What a stretch of records says of one epoch of one holder; states, so applying it again changes nothing."""

    holder: Holder
    life: int
    epoch: int  # sequence of the clear that began it, 0 for the life's first
    first_sequence: int
    last_sequence: int
    engine_sequence: dict[str, int]
    engine_time_s: float
    runs: list[BandRun]
    profile: Profile | None = None
    heartbeat: Heartbeat | None = None

    @property
    def has_data(self) -> bool:
        """Return whether it covers any record beside heartbeats."""
        return self.last_sequence >= self.first_sequence

    def is_first_of(self, known: int | None) -> bool:
        """Return whether it says that a life above the known one has said something; then that is lost."""
        return self.last_sequence > 0 and (known is None or self.life > known)


class Cursor(msgspec.Struct, frozen=True):
    """Where a partition of a topic is read on; a topic that was deleted and made anew has another id."""

    topic_id: str
    partition: int
    offset: int  # next to read


class Flush(msgspec.Struct):
    """One atomic step: data, fences and cursor move together (DESIGN 7)."""

    model: str
    cursor: Cursor | None
    writes: list[HolderWrite]


def fold(records: Iterable[Record]) -> list[HolderWrite]:
    """Return the records' content, consecutive ones of the same epoch joined, in order per holder.

    A record that clears its holder begins a write of its own; heartbeats ride on the newest write.
    """
    writes: list[HolderWrite] = []
    open_writes: dict[Holder, HolderWrite] = {}
    for record in records:
        write = open_writes.get(record.holder)
        cleared = any(isinstance(event, HolderCleared) for event in record.events)
        if write is None or cleared or not _follows(write, record):
            write = _begin(record, write, cleared)
            writes.append(write)
            open_writes[record.holder] = write
        _add(write, record)
    return writes


def _follows(write: HolderWrite, record: Record) -> bool:
    # a heartbeat takes no sequence; one that names a record nobody delivered must not stand for it
    step = 0 if _only_beats(record) else 1
    return record.life == write.life and write.last_sequence <= record.sequence <= write.last_sequence + step


def _only_beats(record: Record) -> bool:
    return bool(record.events) and all(isinstance(event, Heartbeat) for event in record.events)


def _begin(record: Record, before: HolderWrite | None, cleared: bool) -> HolderWrite:
    epoch = -1  # the store's to say: that of the life so far
    if cleared:
        epoch = record.sequence
    elif before is not None and before.life == record.life:
        epoch = before.epoch
    first = record.sequence + 1 if _only_beats(record) else record.sequence  # alone it covers none
    return HolderWrite(record.holder, record.life, epoch, first, record.sequence, {}, record.engine_time_s, [])


def _add(write: HolderWrite, record: Record) -> None:
    write.last_sequence = record.sequence
    write.engine_sequence.update(record.engine_sequence)
    write.engine_time_s = record.engine_time_s
    for event in record.events:
        if isinstance(event, BlocksStored):
            write.runs += _by_band(record, event, event.residency)
        elif isinstance(event, BlocksRemoved):
            write.runs += _by_band(record, event, 0)
        elif isinstance(event, ProfileChanged):
            write.profile = event.profile
        elif isinstance(event, Heartbeat):
            write.heartbeat = event


def _by_band(record: Record, run: BlocksStored | BlocksRemoved, residency: int) -> Iterator[BandRun]:
    """Yield the run cut at multiples of 128, each part with its path inside the band."""
    first = run.depth_blocks % BAND_BLOCKS
    blocks = run.blocks
    path = record.paths[run.path][: first * 8] if first else b""
    while blocks:
        part, blocks = blocks[: BAND_BYTES - first * 8], blocks[BAND_BYTES - first * 8 :]
        yield BandRun(first, path + part, residency)
        first, path = 0, b""
