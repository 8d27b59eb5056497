"""The index in Redis (or Valkey): the only file that knows key names and calls the Lua functions.

Key and value tables stand in `index/README.md`; the functions are in `kvatlas.lua`.
"""

import asyncio
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

import msgspec
import redis.asyncio as aioredis

from index.digests import index_digest
from index.fold import Flush, HolderWrite
from index.match import Run
from index.redis_servers import TRANSLATED, Servers, gather
from index.redis_values import Epoch, Tables, holder_field, holder_of, pack_beats, pack_expected, pack_write, read_rows
from index.store import NOBODY, Applied, Found, HolderRow
from index.walks import Piece, apart, needed, pieces, runs_by_slot, stretches, version_of
from schemas.errors import ConfigError, StaleIndex, StoreUnavailable
from schemas.events import BAND_BYTES
from schemas.profiles import Holder, Profile
from schemas.topics import model_slug

_SCAN_COUNT = 500
_WIPE_COUNT = 5000
_LOCK_MS = 10_000
_LOCKED_S = 0.05


class _Model(msgspec.Struct):
    """What this process remembers of a model; checked by the store at every call."""

    bases: list[str]
    incarnation: str  # '' in a process that only reads
    losses: int = 0  # of connections, when its slots were read
    epochs: dict[Holder, Epoch] = {}  # where writes go
    slots: dict[int, Holder] = {}  # what reads mean
    table: tuple[int, int] = (-1, 0)  # version of those slots, and losses of connections before they were read


class RedisStore:
    """`Store` over one or more Redis servers."""

    def __init__(self, clients: "Sequence[aioredis.Redis]", shards: int = 1) -> None:
        self._servers = Servers(clients)
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
        await self._servers.close()

    async def setup(self, model: str, expected: Mapping[Holder, Profile] = NOBODY) -> bool:
        """Make one incarnation on all shards, empty, where they do not have that; loads the functions first.

        A model that lost the data of one shard begins anew as a whole: what the others say would have holes.

        Raises:
            ConfigError: the model was made with another number of shards.
        """
        functions = files("index").joinpath("kvatlas.lua").read_text()
        await self._servers.command_all("FUNCTION", "LOAD", "REPLACE", functions)
        bases = self._bases(model)
        made = False
        while (incarnation := await self._incarnation(model, bases)) is None:
            lock = f"setup of {bases[0]}"
            if not await self._servers.command(0, "SET", lock, "", "NX", "PX", _LOCK_MS):
                await asyncio.sleep(_LOCKED_S)
                continue
            if await self._incarnation(model, bases) is None:  # nobody was faster
                made = True
                await self._wipe(bases)
                await self._begin(bases, expected)
            await self._servers.command(0, "DEL", lock)
        await self._remember(model, bases, incarnation)
        return made

    async def reload(self, model: str) -> None:
        """Read again what this process remembers for its writes: another process may have written since.

        Raises:
            StaleIndex: the store lost the model's data.
        """
        bases = self._bases(model)
        incarnation = await self._incarnation(model, bases)
        if incarnation is None:
            raise StaleIndex(f"model {model!r} has no incarnation")
        await self._remember(model, bases, incarnation)

    async def apply(self, flush: Flush) -> Applied:
        """Apply data, fences and cursor on every shard of the model."""
        model = self._writable(flush.model)
        if model.losses != self._servers.losses:  # who answers now may not know all slots that were given out
            await self.reload(flush.model)
            model = self._models[flush.model]
        result = Applied()
        parts: list[list[bytes]] = [[] for _ in model.bases]
        for write in flush.writes:
            known = model.epochs.get(write.holder)
            if write.has_data or write.is_first_of(None if known is None else known.life):
                epoch = await self._epoch(flush.model, model, write)
                if epoch is None:
                    result.refused += 1
                    continue
                for shard, packed in enumerate(pack_write(write, epoch, len(parts))):
                    parts[shard].append(packed)
        cursor = flush.cursor
        field = f"{cursor.topic_id} {cursor.partition}" if cursor else ""
        offset = cursor.offset if cursor else 0
        calls = [
            self._fcall(shard, base, "apply", model.incarnation, field, offset, b"".join(parts[shard]))
            for shard, base in enumerate(model.bases)
        ]
        replies = await gather(calls)
        counts = cast("list[int]", replies[0])
        result.add(Applied(*counts))
        result.gaps += await self._beat(model, flush.writes)
        return result

    async def find(self, model: str, chain: bytes, *, gap: int = 0) -> Found:
        """Return where the chain's blocks are."""
        bases = self._bases(model)
        while True:
            if len(bases) == 1:
                version, found = await self._walk(0, bases[0], chain, gap)
            else:
                version, found = await self._walk_shards(bases, chain, gap)
            known = self._models.get(model)
            # a later table may name a slot's next holder, and so may one of a server that has lost its last writes
            if known is not None and known.table == (version, self._servers.losses):
                break
            await self.holders(model)
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
        losses = self._servers.losses
        commands = [
            ("GET", f"{base}i"),
            ("GET", f"{base}v"),
            ("TIME",),
            *(("HGETALL", f"{base}{name}") for name in "fapb"),
        ]
        incarnation, version, now, *tables = await self._servers.transaction(0, commands)
        if incarnation is None:
            raise StaleIndex(f"model {model!r} has no incarnation")
        now_ms = now[0] * 1000 + now[1] // 1000
        rows, slots = read_rows(Tables(*tables), now_ms)
        known = self._models.setdefault(model, _Model(bases, ""))
        known.slots, known.table = slots, (int(version or 0), losses)
        return rows

    async def cursors(self, model: str) -> dict[tuple[str, int], int]:
        """Return (topic id, partition) -> next offset; the least advanced shard's, absent where one has none."""
        shards = [
            await self._servers.command(shard, "HGETALL", f"{base}c") for shard, base in enumerate(self._bases(model))
        ]
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
            fence = await self._servers.command(shard, "HGET", f"{base}f", holder_field(holder))
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
            members = {int(slot) for slot in await self._servers.command(shard, "SMEMBERS", f"{base}d")}
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
        link = self._servers.link(shard)
        while True:
            with TRANSLATED:
                reply = await link.call("FCALL_RO", "kvatlas_find", 1, f"{base}i", *stretches(chain, at * 8, gap))
            found += pieces(reply, chain, at)
            missing = needed(reply)
            if missing is None:
                return version_of(reply), found
            at += missing

    async def _walk_shards(self, bases: list[str], chain: bytes, gap: int) -> tuple[int, list[Piece]]:
        """Ask every shard about its own bands; shard 0 always, for its version names the slots."""
        bands: dict[int, list[int]] = {0: []}
        for at in range(0, len(chain), BAND_BYTES):
            bands.setdefault(int.from_bytes(chain[at : at + 8], "little") % len(bases), []).append(at)
        answers = await gather(
            self._walk(shard, bases[shard], b"".join(chain[at : at + BAND_BYTES] for at in own), gap)
            for shard, own in bands.items()
        )
        found = [piece for own, (_, part) in zip(bands.values(), answers, strict=True) for piece in apart(part, own)]
        return answers[0][0], sorted(found)

    # ---- writing

    def _writable(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None or not known.incarnation:
            raise StaleIndex(f"model {model!r} is not set up by this process")
        return known

    async def _incarnation(self, model: str, bases: list[str]) -> str | None:
        """Return the incarnation that all shards have, or None."""
        found = [await self._servers.command(shard, "GET", f"{base}i") for shard, base in enumerate(bases)]
        if found[0] is not None and found[0].split()[-1] != str(len(bases)).encode():
            raise ConfigError(f"shards: {len(bases)}, but model {model!r} was made as {found[0].decode()!r}")
        return found[0].decode() if found[0] is not None and len(set(found)) == 1 else None

    async def _wipe(self, bases: list[str]) -> None:
        """Delete all that a model has."""
        for shard, base in enumerate(bases):
            cursor: Any = b"0"
            while True:
                cursor, keys = await self._servers.command(
                    shard, "SCAN", cursor, "MATCH", f"{base}*", "COUNT", _WIPE_COUNT
                )
                if keys:
                    await self._servers.command(shard, "UNLINK", *keys)
                if not int(cursor):
                    break

    async def _begin(self, bases: list[str], expected: Mapping[Holder, Profile]) -> None:
        fresh = f"{secrets.token_hex(8)} {len(bases)}"
        members = pack_expected(expected)
        for shard, base in reversed(list(enumerate(bases))):  # readers ask shard 0 for who there is
            await self._fcall(shard, base, "begin", fresh, *([] if shard else members))

    async def _remember(self, model: str, bases: list[str], incarnation: str) -> None:
        known = self._models[model] = _Model(bases, incarnation, self._servers.losses)
        owners = await self._servers.command(0, "HGETALL", f"{known.bases[0]}o")
        for field, text in owners.items():
            life, epoch, slot = (int(part) for part in text.split())
            known.epochs[holder_of(field)] = Epoch(life, epoch, slot)

    async def _epoch(self, name: str, model: _Model, write: HolderWrite) -> Epoch | None:
        """Return the epoch (and slot) that a write belongs to, or None where its life is over."""
        known = model.epochs.get(write.holder)
        epoch = write.epoch
        if epoch < 0:
            epoch = known.epoch if known is not None and known.life == write.life else 0
        if known is not None and (known.life, known.epoch) == (write.life, epoch):
            return known
        for attempt in range(2):
            slot = await self._fcall(
                0, model.bases[0], "take_slot", model.incarnation, holder_field(write.holder), write.life, epoch
            )
            if slot != -2:
                break
            if attempt or not await self.sweep(name):
                raise StoreUnavailable(f"model {name!r}: all slots are taken")
        if slot == -1:
            return None
        taken = Epoch(write.life, epoch, slot)
        if known is None or (known.life, known.epoch) < (taken.life, taken.epoch):
            model.epochs[write.holder] = taken
        return taken

    async def _beat(self, model: _Model, writes: Iterable[HolderWrite]) -> int:
        arguments = pack_beats(writes)
        if not arguments:
            return 0
        return cast(int, await self._fcall(0, model.bases[0], "beat", model.incarnation, *arguments))

    # ---- names

    def _bases(self, model: str) -> list[str]:
        """Return what the keys of each shard begin with."""
        known = self._models.get(model)
        if known is not None:
            return known.bases
        slug = model_slug(model)
        return [f"{{{slug}.{shard}}}" for shard in range(self._shards)]

    async def _fcall(self, shard: int, base: str, name: str, *arguments: Any, kind: str = "FCALL") -> Any:
        return await self._servers.call(shard, kind, f"kvatlas_{name}", 1, f"{base}i", *arguments)
