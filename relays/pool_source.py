"""One model's part of a pool in its relay's process: how far it is believed, and what it tells."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog

from ops.metrics import RELAY_BLOCKS, RELAY_DOUBTS, RELAY_LIVES
from relays.engine_events import EngineEvent
from relays.lossy import Belief, Origin
from relays.pool import PoolModel
from relays.pool_past import Past
from schemas.events import HolderState, Record
from schemas.profiles import Holder, Profile


class PoolSource:
    """Speaks for one model's part of a pool."""

    def __init__(
        self,
        pool: PoolModel,
        origins: Sequence[Origin],
        *,
        next_life: Callable[[], int],
        on_change: Callable[[], None],
        unknown_after_s: float,
    ) -> None:
        self.pool = pool
        self.past: Past | None = None  # while an earlier run's records are read, nothing is told
        self.time_s = 0.0  # of the newest message, by its publisher's clock
        self.origins = origins
        self._belief = Belief(origins, max_age_s=self.profile.max_age_s, unknown_after_s=unknown_after_s)
        self._next_life = next_life
        self._on_change = on_change
        self._log = structlog.get_logger().bind(pool=pool.holder.name, model=pool.model)
        self._label = pool.mirror.profile.engine
        self._telling: Iterator[Record] | None = None

    # ---- what a teller asks

    @property
    def holder(self) -> Holder:
        """Return whose records these are."""
        return self.pool.holder

    @property
    def entry_key(self) -> str:
        """Return the key of its entry in `kv.replicas`: one for each model of the pool."""
        return f"{self.pool.holder.name}@{self.pool.model}"

    @property
    def profile(self) -> Profile:
        """Return what is known of the pool beside its blocks."""
        return self.pool.mirror.profile

    @property
    def life(self) -> int:
        """Return the life that this part speaks in."""
        return self.pool.voice.life

    def next_record(self) -> Record | None:
        """Return the next record that tells the index what is new, or None where it has been told all for now."""
        if self.past is not None:
            return None
        if self._telling is None:
            self._count()
            self._telling = self.pool.speak(self.time_s)
        record = next(self._telling, None)
        if record is None:
            self._telling = None
        return record

    def beat(self, now_s: float) -> Record:
        """Return a heartbeat that says how far the pool is believed; what is too old is forgotten first."""
        self.pool.expire(now_s, self._belief.age_limit_s(now_s))
        self._on_change()  # also where a message of another model alone has moved the counter
        state, reason = self._state(now_s)
        return self.pool.beat(state, reason, self.time_s)

    def begin_life(self, reason: str, *, keep: bool) -> None:
        """Say everything again in a higher life; `keep`: what is known stays known."""
        life = self._next_life()
        self._log.warning("relay.life_begun", reason=reason, life=life, kept=keep)
        RELAY_LIVES.labels(self._label, reason).inc()
        self._telling = None  # nobody waits for the rest of the old life
        self._count()
        self.pool.begin_life(life, keep=keep)
        self._on_change()

    # ---- what an earlier run told

    def await_past(self) -> None:
        """Tell nothing until it is known what an earlier run told: the index keeps that, and goes on from there."""
        self.past = Past()
        self.pool.await_past()

    def restore(self, now_s: float) -> None:
        """Take in what an earlier run told, and begin to speak; what was lost between the runs is not known."""
        told, self.past = None if self.past is None else self.past.whole, None
        if told is not None and any(self._went_back(origin, told.received) for origin in self.origins):
            told = None
        restored = self.pool.restore(told, now_s)
        if told is not None:
            self.pool.received = told.received | self.pool.received
            for origin in self.origins:
                origin.resume(told.received.get(origin.label))
                origin.doubt(now_s, known=restored > 0)
        self._log.info("relay.restored", blocks=restored, told=0 if told is None else len(told.blocks))
        self._on_change()

    def forget_past(self, reason: str) -> None:
        """Begin to speak without what an earlier run told."""
        self._log.warning("relay.not_restored", reason=reason)
        self.past = None
        self.pool.forget_past()
        self._on_change()

    # ---- what its publishers say

    def take(self, events: Iterable[EngineEvent], origin: Origin, sequence: int, time_s: float, now_s: float) -> None:
        """Apply what one message says of this model."""
        self.time_s = time_s
        self.pool.apply(events, origin.label, sequence, now_s)
        self._on_change()

    def trust(self) -> None:
        """Note that nothing which is known comes from before."""
        for origin in self.origins:
            origin.trust()

    def _went_back(self, origin: Origin, received: dict[str, int]) -> bool:
        """Return whether a master has begun anew since, whose memory is what it published."""
        return self.profile.dialect == "mooncake" and (
            origin.first is not None and origin.first <= received.get(origin.label, -1)
        )

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        return self._belief.state(now_s, heard=bool(self.pool.received))

    def _count(self) -> None:
        """Bring the pure core's counts into the metrics."""
        counts = self.pool.mirror.counts
        for reason, count in counts.items():
            if count:
                RELAY_DOUBTS.labels(self._label, reason).inc(count)
        counts.clear()
        RELAY_BLOCKS.labels(self._label).set(self.pool.mirror.blocks)
