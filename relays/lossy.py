"""Sources that cannot replay: what a gap or a lost connection means there, and how far they are believed; pure.

DESIGN 5. Mooncake's master, llm-d's publishers and Dynamo's consolidator have no ring. A gap, or a lost connection,
leaves their holder in doubt: `stale`, its copies ageing twice as fast, until all that may have ended unheard is
forgotten. A sequence that goes back is another run of the publisher. Mooncake adds one to its sequence for each dropped
event, so the size of a gap is no count of messages (engines/other-engines.md 4.1).
"""

from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

from schemas.events import HolderState

Verdict = Literal["next", "gap", "new_life"]


class Seen(NamedTuple):
    """What a message's sequence says."""

    verdict: Verdict
    missed: int = 0  # sequences that never came


class Origin:
    """One publisher: its connection and its counter, which all of its topics and models share."""

    def __init__(self, label: str) -> None:
        self.label = label  # of the source in heartbeats
        self.first: int | None = None  # sequence heard
        self.last: int | None = None
        self.lost_s: float | None = 0.0  # since when it is not connected
        self.doubted_s: float | None = None  # when something may have been lost last
        self._was_connected = False

    def connection(self, *, connected: bool, known: bool, now_s: float) -> None:
        """Note that the publisher is heard, or no longer; what it says meanwhile is not known.

        Args:
            known: anything that may end unheard.
        """
        again = connected and self._was_connected and self.lost_s is not None
        if again or (not connected and self.lost_s is None):
            self.doubt(now_s, known=known)  # at the end of a silence too: all that is known by then may have ended
        self._was_connected |= connected
        if connected:
            self.lost_s = None
        elif self.lost_s is None:
            self.lost_s = now_s

    def take(self, sequence: int) -> Seen:
        """Take a message's sequence; what it says is to be applied in any case, after a new life's retraction.

        The first one may have any number, for we may have joined late: what it missed was never known.
        """
        last, self.last = self.last, sequence
        if last is None:
            self.first = sequence
            return Seen("next", max(0, sequence - 1))  # numbers begin at 1, or at 0
        if self.first is None:
            self.first = sequence
        if sequence == last + 1:
            return Seen("next")
        return Seen("gap", sequence - last - 1) if sequence > last else Seen("new_life")

    def resume(self, last: int | None) -> None:
        """Go on behind the last sequence that an earlier run of this relay took, unless one has come since."""
        if self.first is None and last is not None:
            self.last = max(last, self.last or 0)

    def doubt(self, now_s: float, *, known: bool = True) -> None:
        """Note that something was lost, which matters where anything is known."""
        if known:
            self.doubted_s = now_s

    def trust(self) -> None:
        """Begin anew: nothing that is known comes from before."""
        self.doubted_s = None


class Belief:
    """How far one holder is believed, whose publishers these are, and how long its copies are kept."""

    def __init__(self, origins: Sequence[Origin], *, max_age_s: float | None, unknown_after_s: float) -> None:
        """Prepare.

        Args:
            max_age_s: of copies of a source that is not in doubt; None: they do not age, and nothing is ever doubted.
            unknown_after_s: without any publisher.
        """
        self._origins = origins
        self._max_age_s = max_age_s
        self._unknown_after_s = unknown_after_s
        self._beat_s = self._before_s = -inf  # when the age was asked for last, and the time before

    def age_limit_s(self, now_s: float) -> float | None:
        """Return the age past which copies are to be forgotten now; asked at each beat, before the state."""
        self._before_s, self._beat_s = self._beat_s, now_s
        if self._max_age_s is None:
            return None
        if any(origin.lost_s is not None for origin in self._origins):
            return self._max_age_s / 2
        # half the age after a doubt, all that was known when it came is gone, and nothing that came later
        return min(self._max_age_s, max(self._max_age_s / 2, now_s - self._doubted_s))

    def state(self, now_s: float, *, heard: bool) -> tuple[HolderState, str]:
        """Return the holder's state and why it is not simply live.

        Args:
            heard: something of this life.
        """
        away = [now_s - origin.lost_s for origin in self._origins if origin.lost_s is not None]
        if away:
            # as long as any is heard, what went at the others is a matter of doubt, and of age
            silent = len(away) == len(self._origins) and min(away) > self._unknown_after_s
            return ("unknown" if silent else "stale"), "disconnected"
        # what a doubt has made too old was forgotten at the last beat, so that it is told before the doubt's end is
        if self._max_age_s is not None and self._before_s < self._doubted_s + self._max_age_s / 2:
            return "stale", "events_lost"
        return ("live", "") if heard else ("silent", "no event seen yet")

    @property
    def _doubted_s(self) -> float:
        return max((origin.doubted_s for origin in self._origins if origin.doubted_s is not None), default=-inf)
