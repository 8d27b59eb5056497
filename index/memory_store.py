"""The index in memory: the reference for Redis, the offline replay's store, and a twin without services."""

from collections.abc import Callable, Mapping

import msgspec

from index.digests import index_digest
from index.fold import Flush, HolderWrite
from index.hashing import unpack_hashes
from index.match import Run
from index.store import NOBODY, UNHEARD, Applied, Found, HolderRow
from schemas.errors import StaleIndex
from schemas.events import Heartbeat, HolderState
from schemas.profiles import Holder, Profile

_EXPECTED = 0  # life of a holder that was not heard yet


class _State(msgspec.Struct):
    life: int
    epoch: int
    sequence: int = 0
    broken: bool = False
    applied: dict[str, int] = {}
    profile: Profile | None = None
    blocks: dict[int, int] = {}  # block_hash -> residency
    received: dict[str, int] = {}
    state: HolderState = "silent"
    share_known: float = 1.0
    reason: str = ""
    beat_s: float | None = None


class _Model(msgspec.Struct):
    holders: dict[Holder, _State] = {}
    where: dict[int, dict[Holder, int]] = {}  # block_hash -> holder -> residency
    cursors: dict[tuple[str, int], int] = {}


class MemoryStore:
    """`Store` over dictionaries: one entry a block and holder, nothing clever."""

    def __init__(self, clock_s: Callable[[], float] = lambda: 0.0) -> None:
        self._models: dict[str, _Model] = {}
        self._clock_s = clock_s

    async def setup(self, model: str, expected: Mapping[Holder, Profile] = NOBODY) -> bool:
        """Make the model if there is none."""
        made = model not in self._models
        if made:
            states = {holder: _State(_EXPECTED, 0, profile=profile) for holder, profile in expected.items()}
            for state in states.values():
                self._hear(state, UNHEARD)
            self._models[model] = _Model(states)
        return made

    async def apply(self, flush: Flush) -> Applied:
        """Apply data, fences and cursor."""
        model = self._model(flush.model)
        result = Applied()
        for write in flush.writes:
            known = model.holders.get(write.holder)
            if write.has_data or write.is_first_of(None if known is None else known.life):
                self._apply_write(model, write, result)
            self._apply_heartbeat(model, write, result)
        if flush.cursor is not None:
            key = (flush.cursor.topic_id, flush.cursor.partition)
            model.cursors[key] = max(flush.cursor.offset, model.cursors.get(key, -1))
        return result

    async def find(self, model: str, chain: bytes, *, gap: int = 0) -> Found:
        """Return where the chain's blocks are."""
        where = self._model(model).where
        runs: dict[Holder, list[Run]] = {}
        held_to = 0
        for number, block_hash in enumerate(unpack_hashes(chain)):
            held = where.get(block_hash)
            if not held:
                if number + 1 - held_to > gap:
                    break
                continue
            held_to = number + 1
            for holder, residency in held.items():
                known = runs.setdefault(holder, [])
                last = known[-1] if known else None
                if last and last.start + last.length == number and last.residency == residency:
                    known[-1] = Run(last.start, last.length + 1, residency)
                else:
                    known.append(Run(number, 1, residency))
        return Found(runs)

    async def holders(self, model: str) -> list[HolderRow]:
        """Return the model's holders."""
        now_s = self._clock_s()
        return [
            HolderRow(
                holder=holder,
                life=state.life,
                epoch=state.epoch,
                sequence=state.sequence,
                broken=state.broken,
                applied=dict(state.applied),
                profile=state.profile,
                received=dict(state.received),
                state=state.state,
                share_known=state.share_known,
                reason=state.reason,
                age_s=None if state.beat_s is None else now_s - state.beat_s,
            )
            for holder, state in self._model(model).holders.items()
        ]

    async def cursors(self, model: str) -> dict[tuple[str, int], int]:
        """Return (topic id, partition) -> next offset to read."""
        return dict(self._model(model).cursors)

    async def digest(self, model: str, holder: Holder) -> int:
        """Return the holder's index digest."""
        state = self._model(model).holders.get(holder)
        return index_digest(state.blocks.items() if state else ())

    def _model(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None:
            raise StaleIndex(f"model {model!r} has no incarnation")
        return known

    def _apply_write(self, model: _Model, write: HolderWrite, result: Applied) -> None:
        state = model.holders.get(write.holder)
        if state is not None and write.life < state.life:
            result.refused += 1
            return
        new_life = state is None or write.life > state.life
        epoch = write.epoch if write.epoch >= 0 else 0 if new_life or state is None else state.epoch
        if state is not None and not new_life and (epoch, write.last_sequence) <= (state.epoch, state.sequence):
            result.repeated += 1
            return
        if state is None or new_life or epoch > state.epoch:
            whole = write.first_sequence == 1 or epoch == write.first_sequence
            state = self._begin_epoch(model, write, epoch, state)
            state.broken = not whole
            result.gaps += not whole
        elif write.first_sequence > state.sequence + 1 and not state.broken:
            state.broken = True
            result.gaps += 1
        result.applied += 1
        state.sequence = write.last_sequence
        state.applied.update(write.engine_sequence)
        if write.profile is not None:
            state.profile = write.profile
        for run in write.runs:
            for block_hash in unpack_hashes(run.chain[run.first * 8 :]):
                self._set(model, write.holder, state, block_hash, run.residency)

    def _begin_epoch(self, model: _Model, write: HolderWrite, epoch: int, before: _State | None) -> _State:
        if before is not None:
            for block_hash in list(before.blocks):
                self._set(model, write.holder, before, block_hash, 0)
        state = _State(write.life, epoch)
        if before is not None and before.life in (_EXPECTED, write.life):
            state.profile, state.applied, state.received = before.profile, before.applied, before.received
            state.state, state.share_known, state.reason = before.state, before.share_known, before.reason
            state.beat_s = before.beat_s
        model.holders[write.holder] = state
        return state

    def _apply_heartbeat(self, model: _Model, write: HolderWrite, result: Applied) -> None:
        state, heartbeat = model.holders.get(write.holder), write.heartbeat
        if heartbeat is None or state is None or write.life != state.life:
            return
        if write.last_sequence > state.sequence and not state.broken:
            state.broken = True
            result.gaps += 1
        self._hear(state, heartbeat)

    def _hear(self, state: _State, heartbeat: Heartbeat) -> None:
        state.received = dict(heartbeat.received)
        state.state, state.share_known, state.reason = heartbeat.state, heartbeat.share_known, heartbeat.reason
        state.beat_s = self._clock_s()

    def _set(self, model: _Model, holder: Holder, state: _State, block_hash: int, residency: int) -> None:
        if residency:
            state.blocks[block_hash] = residency
            model.where.setdefault(block_hash, {})[holder] = residency
            return
        if state.blocks.pop(block_hash, None) is not None:
            held = model.where[block_hash]
            del held[holder]
            if not held:
                del model.where[block_hash]
