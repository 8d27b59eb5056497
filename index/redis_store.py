"""The index in Redis (or Valkey): the only file that knows key names and calls the Lua functions.

Key and value tables stand in `index/README.md`; the functions are in `kvatlas.lua`.
"""

import asyncio
import secrets
import struct
from collections.abc import Awaitable, Iterable, Sequence
from importlib.resources import files
from typing import Any, cast

import msgspec
import redis.asyncio as aioredis
from redis.exceptions import RedisError, ResponseError

from index.digests import index_digest
from index.fold import BandRun, Flush, HolderWrite
from index.hashing import BAND_BLOCKS
from index.match import Run
from index.redis_link import Link
from index.store import Applied, Found, HolderRow
from index.walks import Piece, apart, needed, pieces, runs_by_slot, stretches, version_of
from schemas.errors import StaleIndex, StoreUnavailable
from schemas.events import Heartbeat
from schemas.profiles import Holder, Profile
from schemas.topics import model_slug

_BAND_BYTES = BAND_BLOCKS * 8
_WRITE = struct.Struct("<HQQ?HQQBII")
_RUN_HEAD = struct.Struct("<BHH")
_SCAN_COUNT = 500
_profiles = msgspec.msgpack.Decoder(Profile)
_heartbeats = msgspec.msgpack.Decoder(Heartbeat)
_encode = msgspec.msgpack.Encoder().encode


class _Epoch(msgspec.Struct, frozen=True):
    life: int
    epoch: int
    slot: int


class _Model(msgspec.Struct):
    """What this process remembers of a model; checked by the store at every call."""

    bases: list[str]
    incarnations: list[str]
    epochs: dict[Holder, _Epoch] = {}  # where writes go
    slots: dict[int, Holder] = {}  # what reads mean, at `version`
    version: int = -1


class RedisStore:
    """`Store` over one or more Redis servers; shard s of a model lives on server s mod servers."""

    def __init__(self, clients: "Sequence[aioredis.Redis]", shards: int = 1) -> None:
        self._clients = list(clients)
        self._links = [Link(client) for client in self._clients]
        self._shards = shards
        self._models: dict[str, _Model] = {}

    @classmethod
    def from_urls(cls, urls: Sequence[str], shards: int = 1, *, timeout_s: float = 5.0) -> "RedisStore":
        """Return a store on these servers; nothing is opened yet."""
        clients = [
            aioredis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s) for url in urls
        ]
        return cls(clients, shards)

    async def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            link.close()
        for client in self._clients:
            await client.aclose()

    async def load_functions(self) -> None:
        """Load the Lua library on every server."""
        source = files("index").joinpath("kvatlas.lua").read_text()
        for server in range(len(self._clients)):
            await self._command(server, "FUNCTION", "LOAD", "REPLACE", source)

    async def setup(self, model: str) -> bool:
        """Make incarnations where shards have none; loads the functions first."""
        await self.load_functions()
        bases = self._bases(model)
        made = False
        incarnations: list[str] = []
        for shard, base in enumerate(bases):
            made |= bool(await self._command(shard, "SET", f"{base}i", secrets.token_hex(8), "NX"))
            incarnations.append((await self._command(shard, "GET", f"{base}i")).decode())
        self._models[model] = _Model(bases, incarnations)
        await self._load_epochs(model)
        return made

    async def apply(self, flush: Flush) -> Applied:
        """Apply data, fences and cursor on every shard of the model."""
        model = self._writable(flush.model)
        result = Applied()
        parts: list[list[bytes]] = [[] for _ in model.bases]
        for write in flush.writes:
            if write.has_data:
                epoch = await self._epoch(flush.model, model, write)
                if epoch is None:
                    result.refused += 1
                    continue
                for shard, packed in enumerate(_pack_write(write, epoch, len(parts))):
                    parts[shard].append(packed)
        cursor = flush.cursor
        field = f"{cursor.topic_id} {cursor.partition}" if cursor else ""
        offset = cursor.offset if cursor else 0
        calls = [
            self._call(shard, "apply", model.incarnations[shard], field, offset, b"".join(parts[shard]), model=model)
            for shard in range(len(parts))
        ]
        replies = await _gather(calls)
        counts = cast("list[int]", replies[0])
        result.add(Applied(*counts))
        result.gaps += await self._beat(model, flush.writes)
        return result

    async def find(self, model: str, chain: bytes, *, gap: int = 0) -> Found:
        """Return where the chain's blocks are."""
        bases = self._bases(model)
        if len(bases) == 1:
            version, found = await self._walk(0, bases[0], chain, gap)
        else:
            version, found = await self._walk_shards(bases, chain, gap)
        known = self._models.get(model)
        if known is None or known.version != version:
            await self.holders(model)
            known = self._models[model]
        runs = runs_by_slot(found)
        by_holder: dict[Holder | None, Sequence[Run]] = dict(
            zip(map(known.slots.get, runs), runs.values(), strict=True)
        )
        by_holder.pop(None, None)  # slots that nobody has any more
        return Found(cast("dict[Holder, Sequence[Run]]", by_holder))

    async def holders(self, model: str) -> list[HolderRow]:
        """Return the model's holders."""
        bases = self._bases(model)
        base = bases[0]
        with _TRANSLATED:
            async with self._client(0).pipeline(transaction=True) as pipe:
                queue = cast("Any", pipe).execute_command
                queue("GET", f"{base}i")
                queue("GET", f"{base}v")
                queue("TIME")
                for name in "fapb":
                    queue("HGETALL", f"{base}{name}")
                incarnation, version, now, fences, applied, profiles, beats = await pipe.execute()
        if incarnation is None:
            raise StaleIndex(f"model {model!r} has no incarnation")
        now_ms = now[0] * 1000 + now[1] // 1000
        told = _applied_of(applied)
        rows: list[HolderRow] = []
        slots: dict[int, Holder] = {}
        for name, fence in fences.items():
            row = _row(name, fence, told.get(name, {}), profiles.get(name), beats.get(name), now_ms)
            slots[int(fence.split()[2])] = row.holder
            rows.append(row)
        known = self._models.setdefault(model, _Model(bases, []))
        known.slots, known.version = slots, int(version or 0)
        return rows

    async def cursors(self, model: str) -> dict[tuple[str, int], int]:
        """Return (topic id, partition) -> next offset; the least advanced shard's, absent where one has none."""
        shards = [await self._command(shard, "HGETALL", f"{base}c") for shard, base in enumerate(self._bases(model))]
        fields = set.intersection(*(set(shard) for shard in shards))
        least = {field: min(int(shard[field]) for shard in shards) for field in fields}
        return {
            (topic_id, int(partition)): offset
            for field, offset in least.items()
            for topic_id, partition in [field.decode().split(" ")]
        }

    async def digest(self, model: str, holder: Holder) -> int:
        """Return the holder's index digest; walks the whole keyspace of the model's servers."""
        blocks: list[tuple[int, int]] = []
        for shard, base in enumerate(self._bases(model)):
            fence = await self._command(shard, "HGET", f"{base}f", _holder_field(holder))
            if fence is None:
                continue
            cursor = b"0"
            while True:
                cursor, packed = await self._fcall(
                    shard, base, "dump", cursor, _SCAN_COUNT, int(fence.split()[2]), kind="FCALL_RO"
                )
                blocks += struct.iter_unpack("<QH", packed)
                if cursor == b"0":
                    break
        return index_digest(set(blocks))

    async def sweep(self, model: str) -> int:
        """Forget the blocks of slots that no holder has any more, and free those slots; return how many."""
        bases = self._bases(model)
        dead: set[int] | None = None
        for shard, base in enumerate(bases):
            members = {int(slot) for slot in await self._command(shard, "SMEMBERS", f"{base}d")}
            dead = members if dead is None else dead & members
        if not dead:
            return 0
        packed = b"".join(slot.to_bytes(2, "little") for slot in dead)
        for shard, base in enumerate(bases):
            cursor: Any = b"0"
            while True:
                cursor = await self._fcall(shard, base, "sweep", cursor, _SCAN_COUNT, packed)
                if cursor == b"0":
                    break
        for shard, base in reversed(list(enumerate(bases))):
            await self._fcall(shard, base, "swept", 0 if shard else 1, *dead)
        return len(dead)

    # ---- reading

    async def _walk(self, shard: int, base: str, chain: bytes, gap: int) -> tuple[int, list[Piece]]:
        """Return the table's version, and the segments along bands of a chain that are this shard's own."""
        found: list[Piece] = []
        at = 0
        link = self._link(shard)
        while True:
            with _TRANSLATED:
                reply = await link.call("FCALL_RO", "kvatlas_find", 1, f"{base}i", *stretches(chain, at * 8, gap))
            found += pieces(reply, chain, at)
            missing = needed(reply)
            if missing is None:
                return version_of(reply), found
            at += missing

    async def _walk_shards(self, bases: list[str], chain: bytes, gap: int) -> tuple[int, list[Piece]]:
        """Ask every shard about its own bands; shard 0 always, for its version names the slots."""
        bands: dict[int, list[int]] = {0: []}
        for at in range(0, len(chain), _BAND_BYTES):
            bands.setdefault(int.from_bytes(chain[at : at + 8], "little") % len(bases), []).append(at)
        answers = await _gather(
            self._walk(shard, bases[shard], b"".join(chain[at : at + _BAND_BYTES] for at in own), gap)
            for shard, own in bands.items()
        )
        found = [piece for own, (_, part) in zip(bands.values(), answers, strict=True) for piece in apart(part, own)]
        return answers[0][0], sorted(found)

    # ---- writing

    def _writable(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None or not known.incarnations:
            raise StaleIndex(f"model {model!r} is not set up by this process")
        return known

    async def _load_epochs(self, model: str) -> None:
        known = self._models[model]
        owners = await self._command(0, "HGETALL", f"{known.bases[0]}o")
        for field, text in owners.items():
            life, epoch, slot = (int(part) for part in text.split())
            known.epochs[_holder_of(field)] = _Epoch(life, epoch, slot)

    async def _epoch(self, name: str, model: _Model, write: HolderWrite) -> _Epoch | None:
        """Return the epoch (and slot) that a write belongs to, or None where its life is over."""
        known = model.epochs.get(write.holder)
        epoch = write.epoch
        if epoch < 0:
            epoch = known.epoch if known is not None and known.life == write.life else 0
        if known is not None and (known.life, known.epoch) == (write.life, epoch):
            return known
        for attempt in range(2):
            slot = await self._call(
                0, "take_slot", model.incarnations[0], _holder_field(write.holder), write.life, epoch, model=model
            )
            if slot != -2:
                break
            if attempt or not await self.sweep(name):
                raise StoreUnavailable(f"model {name!r}: all slots are taken")
        if slot == -1:
            return None
        taken = _Epoch(write.life, epoch, slot)
        if known is None or (known.life, known.epoch) < (taken.life, taken.epoch):
            model.epochs[write.holder] = taken
        return taken

    async def _beat(self, model: _Model, writes: Iterable[HolderWrite]) -> int:
        arguments: list[bytes | str | int] = []
        for write in writes:
            if write.heartbeat is not None:
                arguments += [
                    _holder_field(write.holder),
                    f"{write.life} {write.last_sequence}",
                    _encode(write.heartbeat),
                ]
        if not arguments:
            return 0
        return cast(int, await self._call(0, "beat", model.incarnations[0], *arguments, model=model))

    # ---- calls

    def _bases(self, model: str) -> list[str]:
        known = self._models.get(model)
        if known is not None:
            return known.bases
        slug = model_slug(model)
        return [f"{{{slug}.{shard}}}" for shard in range(self._shards)]

    def _client(self, shard: int) -> "aioredis.Redis":
        return self._clients[shard % len(self._clients)]

    async def _call(self, shard: int, name: str, *arguments: Any, model: _Model) -> Any:
        return await self._fcall(shard, model.bases[shard], name, *arguments)

    def _link(self, shard: int) -> Link:
        return self._links[shard % len(self._links)]

    async def _fcall(self, shard: int, base: str, name: str, *arguments: Any, kind: str = "FCALL") -> Any:
        with _TRANSLATED:
            return await self._link(shard).call(kind, f"kvatlas_{name}", 1, f"{base}i", *arguments)

    async def _command(self, shard: int, *arguments: Any) -> Any:
        with _TRANSLATED:
            return await cast("Any", self._client(shard)).execute_command(*arguments)


class _Translated:
    """Raises the library's errors as ours."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Translate."""
        if isinstance(error, ResponseError):
            text = str(error)
            if text.startswith("KVSTALE") or "Function not found" in text:
                raise StaleIndex(text) from error
            raise StoreUnavailable(text) from error
        if isinstance(error, RedisError | OSError):
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error


_TRANSLATED = _Translated()


async def _gather(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    listed = list(calls)
    if len(listed) == 1:
        return [await listed[0]]
    return list(await asyncio.gather(*listed))


def _holder_field(holder: Holder) -> bytes:
    return f"{holder.name}\n{'' if holder.rank is None else holder.rank}".encode()


def _holder_of(field: bytes) -> Holder:
    name, rank = field.decode().rsplit("\n", 1)
    return Holder(name, int(rank) if rank else None)


def _applied_of(fields: dict[bytes, bytes]) -> dict[bytes, dict[str, tuple[int, int]]]:
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
        holder=_holder_of(name),
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


def _pack_write(write: HolderWrite, epoch: _Epoch, shards: int) -> list[bytes]:
    """Return the write as each shard gets it: its own runs, and the fence of all."""
    runs: list[list[BandRun]] = [[] for _ in range(shards)]
    if shards == 1:
        runs[0] = write.runs
    else:
        for run in write.runs:
            runs[int.from_bytes(run.chain[:8], "little") % shards].append(run)
    name = _holder_field(write.holder)
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
