"""The order of one rank's events where a relay must ask for them, and what a gap means there; pure (DESIGN 5).

Asking takes the events away: what a lost answer held is gone, and shows as a gap in the rank's own counter when its
next event comes. So after a failed poll the next event decides, for each rank alone: it follows, or a new life begins.
The counter begins at 0 with the engine and runs through the events of all attention windows (engines/other-engines.md
2.1).
"""

from typing import Literal, NamedTuple

Reason = Literal["gap", "sequence_back", "larger_window"]
"""Why a life ends."""


class Heard(NamedTuple):
    """What an event's place says."""

    ended: Reason | None  # the life before it; it is the first of another
    applies: bool  # it is about the window that is credited


class PulledSequence:
    """One rank; its first event may have any number, for others may have asked before us.

    Every window announces its own copy of a block. The largest one alone is credited; where a larger one appears, what
    was credited was not the largest.
    """

    def __init__(self, windows: tuple[int, ...] = ()) -> None:
        self.doubtful = False  # a poll failed, and no event has come since
        self.windows = windows  # tokens, largest first
        self._next: int | None = None
        self._applied = False  # something of this life was about blocks

    def doubt(self) -> None:
        """Note that a poll failed: what its answer held may be lost."""
        self.doubtful = True

    def take(self, event_id: int, window: int | None, *, created: bool) -> Heard:
        """Take an event's number and window.

        Args:
            created: it tells of a window's pool, and of no block.
        """
        ended: Reason | None = None
        if self._next is not None and event_id != self._next:
            ended = "gap" if event_id > self._next else "sequence_back"
        self._next = event_id + 1
        self.doubtful = False
        if ended is not None:
            self._applied = False
        if window is not None and window not in self.windows:
            if self._applied and window > max(self.windows, default=0):
                ended, self._applied = "larger_window", False
            self.windows = tuple(sorted((*self.windows, window), reverse=True))
        applies = window is None or window == self.windows[0]
        self._applied |= applies and not created
        return Heard(ended, applies)
