"""What the index's keys hold in Redis: writes as its functions take them, and rows as they are read back; pure.

Tables of keys and values stand in `index/README.md`.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from index.fold import BandRun, HolderWrite
from index.store import UNHEARD, HolderRow
from schemas.events import Heartbeat
from schemas.profiles import Holder, Profile

_WRITE = struct.Struct("<HQQ?HQQBII")
_RUN_HEAD = struct.Struct("<BHH")
_NO_FENCE = b"0 0 0 0 0"  # of a holder that is expected
_profiles = msgspec.msgpack.Decoder(Profile)
_heartbeats = msgspec.msgpack.Decoder(Heartbeat)
_encode = msgspec.msgpack.Encoder().encode


class Epoch(msgspec.Struct, frozen=True):
    """Where a holder's writes go."""

    life: int
    epoch: int
    slot: int


class Tables(NamedTuple):
    """The hashes that rows are made of: each by holder, but `applied` by holder and source."""

    fences: Mapping[bytes, bytes]
    applied: Mapping[bytes, bytes]
    profiles: Mapping[bytes, bytes]
    beats: Mapping[bytes, bytes]


def holder_field(holder: Holder) -> bytes:
    """Return a holder as hashes name it."""
    return f"{holder.name}\n{'' if holder.rank is None else holder.rank}".encode()


def holder_of(field: bytes) -> Holder:
    """Return whom a field of a hash names."""
    name, rank = field.decode().rsplit("\n", 1)
    return Holder(name, int(rank) if rank else None)


# ---- writing


def pack_write(write: HolderWrite, epoch: Epoch, shards: int) -> list[bytes]:
    """Return the write as each shard gets it: its own runs, and the fence of all."""
    runs: list[list[BandRun]] = [[] for _ in range(shards)]
    if shards == 1:
        runs[0] = write.runs
    else:
        for run in write.runs:
            runs[int.from_bytes(run.chain[:8], "little") % shards].append(run)
    name = holder_field(write.holder)
    sources = b"".join(
        len(source.encode()).to_bytes(1, "little") + source.encode() + sequence.to_bytes(8, "little")
        for source, sequence in write.engine_sequence.items()
    )
    packed: list[bytes] = []
    for shard, shard_runs in enumerate(runs):
        profile = _encode(write.profile) if write.profile is not None and shard == 0 else b""
        head = _WRITE.pack(
            len(name),
            epoch.life,
            epoch.epoch,
            write.epoch >= 0,
            epoch.slot,
            write.first_sequence,
            write.last_sequence,
            len(write.engine_sequence),
            len(shard_runs),
            len(profile),
        )
        parts = [head, name, profile, sources]
        for run in shard_runs:
            parts += (_RUN_HEAD.pack(run.first, run.residency, len(run.chain)), run.chain)
        packed.append(b"".join(parts))
    return packed


def pack_beats(writes: Iterable[HolderWrite]) -> list[bytes | str]:
    """Return the heartbeats among the writes, as `beat` takes them."""
    arguments: list[bytes | str] = []
    for write in writes:
        if write.heartbeat is not None:
            position = f"{write.life} {write.last_sequence}"
            arguments += [holder_field(write.holder), position, _encode(write.heartbeat)]
    return arguments


def pack_expected(expected: Mapping[Holder, Profile]) -> list[bytes]:
    """Return who will be heard again, as `begin` takes them."""
    unheard = _encode(UNHEARD)
    return [part for holder, profile in expected.items() for part in (holder_field(holder), _encode(profile), unheard)]


# ---- reading


def read_rows(tables: Tables, now_ms: int) -> tuple[list[HolderRow], dict[int, Holder]]:
    """Return what is known of each holder, also of those that are only expected, and whose slots are whose."""
    told = _applied_of(tables.applied)
    expected = {name: _NO_FENCE for name in tables.profiles if name not in tables.fences}
    rows = [
        _row(name, fence, told.get(name, {}), tables.profiles.get(name), tables.beats.get(name), now_ms)
        for name, fence in (expected | dict(tables.fences)).items()
    ]
    return rows, {int(fence.split()[2]): holder_of(name) for name, fence in tables.fences.items()}


def _applied_of(fields: Mapping[bytes, bytes]) -> dict[bytes, dict[str, tuple[int, int]]]:
    """Return holder -> source -> (life, last engine sequence applied)."""
    told: dict[bytes, dict[str, tuple[int, int]]] = {}
    for field, text in fields.items():
        name, _, source = field.rpartition(b"\0")
        life, sequence = text.split()
        told.setdefault(name, {})[source.decode()] = (int(life), int(sequence))
    return told


def _row(
    name: bytes,
    fence: bytes,
    applied: dict[str, tuple[int, int]],
    profile: bytes | None,
    beat: bytes | None,
    now_ms: int,
) -> HolderRow:
    life, epoch, _, sequence, broken = (int(part) for part in fence.split())
    heartbeat, age_s = None, None
    if beat is not None:
        stamp, _, packed = beat.partition(b" ")
        heartbeat, age_s = _heartbeats.decode(packed), (now_ms - int(stamp)) / 1000
    return HolderRow(
        holder=holder_of(name),
        life=life,
        epoch=epoch,
        sequence=sequence,
        broken=bool(broken),
        applied={source: told for source, (its_life, told) in applied.items() if its_life == life},
        profile=None if profile is None else _profiles.decode(profile),
        received=heartbeat.received if heartbeat else {},
        state=heartbeat.state if heartbeat else "silent",
        share_known=heartbeat.share_known if heartbeat else 1.0,
        reason=heartbeat.reason if heartbeat else "",
        age_s=age_s,
    )
