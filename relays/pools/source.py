"""One model's part of a pool in its relay's process: how far it is believed, and what it tells."""

from collections.abc import Iterable, Sequence

from ops.metrics import RELAY_REJECTS
from relays.engine_events import EngineEvent, Reject
from relays.lossy import Belief, Origin
from relays.pools.past import Past
from relays.pools.pool import PoolModel
from relays.source import HolderSource, Owner, log_refused
from schemas.events import HolderState, Record


class PoolSource(HolderSource[PoolModel]):
    """Speaks for one model's part of a pool."""

    def __init__(self, pool: PoolModel, origins: Sequence[Origin], owner: Owner) -> None:
        super().__init__(pool, owner)
        self.origins = origins
        self.past: Past | None = None  # while an earlier run's records are read, nothing is told
        self._belief = Belief(origins, max_age_s=self.profile.max_age_s, unknown_after_s=owner.unknown_after_s)

    @property
    def pool(self) -> PoolModel:
        """Return the part itself."""
        return self._mirrored

    @property
    def entry_key(self) -> str:
        """Return the key of its entry in `kv.replicas`: one for each model of the pool."""
        return f"{self.holder.name}@{self.profile.model}"

    def next_record(self) -> Record | None:
        """Return the next record that tells the index what is new, or None where it has been told all for now."""
        return super().next_record() if self.past is None else None

    def beat(self, now_s: float) -> Record:
        """Return a heartbeat that says how far the pool is believed; what is too old is forgotten first."""
        self._on_change()  # also where a message of another model alone has moved the counter
        return super().beat(now_s)

    def begin_life(self, reason: str, *, keep: bool) -> None:
        """Say everything again in a higher life; `keep`: what is known stays known."""
        super().begin_life(reason, keep=keep)
        if not keep:
            self.past = None
            for origin in self.origins:
                origin.trust()  # nothing that is known comes from before

    # ---- what an earlier run told

    def await_past(self, most_blocks: int) -> None:
        """Tell nothing until it is known what an earlier run told: the index keeps that, and goes on from there."""
        self.past = Past(most_blocks)

    def restore(self, now_s: float) -> None:
        """Take in what an earlier run told, and begin to speak; what was lost between the runs is not known."""
        past, self.past = self.past, None
        told = None if past is None else past.whole
        restored = 0
        if past is not None and told is not None and not self._began_anew(told.received):
            restored = self.pool.restore(told, past.heard, now_s)
            for origin in self.origins:
                origin.resume(told.received.get(origin.label))
                origin.doubt(now_s, known=restored > 0)
        self._log.info("relay.restored", blocks=restored, told=0 if told is None else len(told.blocks))
        self._on_change()

    def forget_past(self, reason: str) -> None:
        """Begin to speak without what an earlier run told."""
        self._log.warning("relay.not_restored", reason=reason)
        self.past = None
        self._on_change()

    # ---- what its publishers say

    def take(self, events: Iterable[EngineEvent], origin: Origin, sequence: int, time_s: float, now_s: float) -> None:
        """Apply what one message says of this model."""
        batch = list(events)
        if self.past is not None:
            self.past.hear(batch)
            if self.past.too_long:
                self.forget_past("too much was heard meanwhile")
        self.pool.apply(batch, origin.label, sequence, time_s, now_s)
        self._on_change()

    def refuse(self, sequence: int, rejects: Sequence[Reject]) -> None:
        """Count and log what cannot be used of a message."""
        for reject in rejects:
            RELAY_REJECTS.labels(self._label, reject.reason).inc()
        log_refused(self._log, sequence, rejects)

    def _began_anew(self, received: dict[str, int]) -> bool:
        """Return whether a master has begun anew since, whose memory is what it published."""
        return self.profile.dialect == "mooncake" and any(
            origin.first is not None and origin.first <= received.get(origin.label, -1) for origin in self.origins
        )

    @property
    def _share_known(self) -> float:
        return 1.0 if self.past is None else 0.0

    def _age_limit_s(self, now_s: float) -> float | None:
        return self._belief.age_limit_s(now_s)

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        if self.past is not None:
            return "catching_up", "reads what an earlier run told"
        return self._belief.state(now_s, heard=bool(self.pool.received))
