"""What every holder has in a relay's process, however its events come: records, heartbeats, lives and counts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from ops.metrics import RELAY_BLOCKS, RELAY_DOUBTS, RELAY_LIVES, RELAY_REJECTS
from relays.engine import EngineRank
from relays.engine_events import Decoded, Reject
from relays.holder import MirroredHolder
from schemas.events import HolderState, Record
from schemas.profiles import Holder, Profile

Mirrored = TypeVar("Mirrored", bound=MirroredHolder)


class Owner(NamedTuple):
    """What the process that owns a source gives it."""

    next_life: Callable[[], int]
    on_change: Callable[[], None]  # there is something to tell
    unknown_after_s: float  # a source that is away this long is no longer believed


class HolderSource(ABC, Generic[Mirrored]):
    """Speaks for one holder; who owns it publishes what its mirror has to say."""

    def __init__(self, mirrored: Mirrored, owner: Owner) -> None:
        self._mirrored = mirrored
        self._next_life, self._on_change, self._unknown_after_s = owner
        self._label = self.profile.engine
        self._log = structlog.get_logger().bind(holder=str(self.holder), model=self.profile.model)
        self._telling: Iterator[Record] | None = None

    @property
    def holder(self) -> Holder:
        """Return whose records these are."""
        return self._mirrored.holder

    @property
    def entry_key(self) -> str:
        """Return the key of its entry in `kv.replicas`: the name, which the ranks of a replica share."""
        return self.holder.name

    @property
    def profile(self) -> Profile:
        """Return what is known of it beside its blocks."""
        return self._mirrored.mirror.profile

    @property
    def life(self) -> int:
        """Return the life that it speaks in."""
        return self._mirrored.voice.life

    @abstractmethod
    def _state(self, now_s: float) -> tuple[HolderState, str]:
        """Return how far this source is believed, and why not further."""

    def _age_limit_s(self, now_s: float) -> float | None:
        """Return the age past which copies that nothing may ever remove are forgotten now; None: none is."""
        return self.profile.max_age_s

    @property
    def _share_known(self) -> float:
        return 1.0

    def next_record(self) -> Record | None:
        """Return the next record that tells the index what is new, or None where it has been told all for now."""
        if self._telling is None:
            self._count()
            self._telling = self._mirrored.speak()
        record = next(self._telling, None)
        if record is None:
            self._telling = None
        return record

    def beat(self, now_s: float) -> Record:
        """Return a heartbeat that says how far this source is believed; what is too old is forgotten first."""
        self._mirrored.expire(now_s, self._age_limit_s(now_s))
        if self._mirrored.mirror.changed:
            self._on_change()
        state, reason = self._state(now_s)
        return self._mirrored.beat(state, reason=reason, share_known=self._share_known)

    def begin_life(self, reason: str, *, keep: bool) -> None:
        """Say everything again in a higher life; `keep`: what is known stays known."""
        life = self._next_life()
        self._log.warning("relay.life_begun", reason=reason, life=life, kept=keep)
        RELAY_LIVES.labels(self._label, reason).inc()
        self._telling = None  # nobody waits for the rest of the old life
        self._count()
        if keep:
            self._mirrored.say_again(life)
        else:
            self._mirrored.begin_life(life)
        self._on_change()

    def _count(self) -> None:
        """Bring the pure core's counts into the metrics."""
        counts = self._mirrored.mirror.counts
        for reason, count in counts.items():
            if count:
                RELAY_DOUBTS.labels(self._label, reason).inc(count)
        counts.clear()
        RELAY_BLOCKS.labels(self._label, self.profile.model, str(self.holder)).set(self._mirrored.mirror.blocks)


class RankSource(HolderSource[EngineRank]):
    """Speaks for one rank of a replica."""

    @property
    def engine(self) -> EngineRank:
        """Return the rank itself."""
        return self._mirrored

    def _unconnected(self, lost_s: float, now_s: float) -> tuple[HolderState, str]:
        return ("unknown" if now_s - lost_s > self._unknown_after_s else "stale"), "disconnected"

    def _report(self, sequence: int, decoded: Decoded | None) -> None:
        """Log what was refused of a message."""
        if decoded is not None:
            log_refused(self._log, sequence, decoded.rejects)

    def _reject(self, reason: str, detail: str) -> None:
        RELAY_REJECTS.labels(self._label, reason).inc()
        self._log.warning("relay.message_refused", reason=reason, detail=detail)

    def _count(self) -> None:
        for reason, count in self.engine.counts.items():
            if count:
                RELAY_REJECTS.labels(self._label, reason).inc(count)
        self.engine.counts.clear()
        super()._count()


def log_refused(log: Any, sequence: int, rejects: Sequence[Reject]) -> None:
    """Log, once for a message, what was refused of it."""
    if rejects:
        first = rejects[0]
        log.warning("relay.events_refused", sequence=sequence, count=len(rejects), reason=first.reason, at=first.detail)
