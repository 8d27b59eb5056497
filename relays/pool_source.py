"""One model's part of a pool in its relay's process: how far it is believed, and what it tells."""

from collections.abc import Callable, Iterable, Iterator

import structlog

from ops.metrics import RELAY_BLOCKS, RELAY_DOUBTS, RELAY_LIVES
from relays.engine_events import EngineEvent
from relays.lossy import LossySequence
from relays.pool import PoolModel
from schemas.events import HolderState, Record
from schemas.profiles import Holder, Profile


class Origin:
    """One publisher of a pool: its connection and its counter, which all of its models share."""

    def __init__(self, label: str) -> None:
        self.label = label  # of the source in heartbeats
        self.sequence = LossySequence()
        self.lost_s: float | None = 0.0  # since when it is not connected
        self._doubt_until_s = 0.0

    def connection(self, *, connected: bool, now_s: float, doubt_s: float) -> None:
        """Note that the publisher is heard, or no longer; what it says meanwhile is not known."""
        if connected:
            self.lost_s = None
        elif self.lost_s is None:
            self.lost_s = now_s
            if self.sequence.last is not None:
                self.doubt(now_s, doubt_s)

    def doubt(self, now_s: float, doubt_s: float) -> None:
        """Note that something was lost; what it could have ended is forgotten by its age within `doubt_s`."""
        self._doubt_until_s = max(self._doubt_until_s, now_s + doubt_s)

    def trust(self) -> None:
        """Begin anew: nothing that is known comes from before."""
        self._doubt_until_s = 0.0

    def doubtful(self, now_s: float) -> bool:
        """Return whether something that is known may have ended unheard."""
        return now_s < self._doubt_until_s


class PoolSource:
    """Speaks for one model's part of a pool."""

    def __init__(
        self,
        pool: PoolModel,
        origins: Iterable[Origin],
        *,
        next_life: Callable[[], int],
        on_change: Callable[[], None],
        unknown_after_s: float,
    ) -> None:
        self.pool = pool
        self.time_s = 0.0  # of the newest message, by its publisher's clock
        self._origins = list(origins)
        self._next_life = next_life
        self._on_change = on_change
        self._unknown_after_s = unknown_after_s
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
        if self._telling is None:
            self._count()
            self._telling = self.pool.speak(self.time_s)
        record = next(self._telling, None)
        if record is None:
            self._telling = None
        return record

    def beat(self, now_s: float) -> Record:
        """Return a heartbeat that says how far the pool is believed; what is too old is forgotten first."""
        self.pool.expire(now_s, doubtful=any(origin.doubtful(now_s) for origin in self._origins))
        if self.pool.mirror.changed:
            self._on_change()
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

    # ---- what its publishers say

    def take(self, events: Iterable[EngineEvent], origin: Origin, sequence: int, time_s: float, now_s: float) -> None:
        """Apply what one message says of this model."""
        self.time_s = time_s
        self.pool.apply(events, origin.label, sequence, now_s)
        self._on_change()

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        away = [now_s - origin.lost_s for origin in self._origins if origin.lost_s is not None]
        if away:
            # the others still tell what comes; whatever went at this one is not known
            return ("unknown" if max(away) > self._unknown_after_s else "stale"), "disconnected"
        if any(origin.doubtful(now_s) for origin in self._origins):
            return "stale", "events_lost"
        if not self.pool.received:
            return "silent", "no event seen yet"
        return "live", ""

    def _count(self) -> None:
        """Bring the pure core's counts into the metrics."""
        counts = self.pool.mirror.counts
        for reason, count in counts.items():
            if count:
                RELAY_DOUBTS.labels(self._label, reason).inc(count)
        counts.clear()
        RELAY_BLOCKS.labels(self._label).set(self.pool.mirror.blocks)
