"""The order of a source that cannot replay: what a gap means there; pure (DESIGN 5).

Mooncake's master and llm-d's publishers have no ring. A gap, or a lost connection, leaves their holder in doubt:
`stale`, its copies ageing twice as fast, until a sequence that goes back begins a new life. Mooncake adds one to its
sequence for each dropped event, so the size of a gap is no count of messages (engines/other-engines.md 4.1).
"""

from typing import Literal, NamedTuple

Verdict = Literal["next", "gap", "new_life"]


class Seen(NamedTuple):
    """What a message's sequence says."""

    verdict: Verdict
    missed: int = 0  # sequences that never came


class LossySequence:
    """One publisher's counter; its first message may have any number, for we joined late."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.doubtful = False  # something was lost in this life

    def take(self, sequence: int) -> Seen:
        """Take a message's sequence; what it says is to be applied in any case, after a new life's retraction."""
        last, self.last = self.last, sequence
        if last is None:
            # from 1 on (0 in some dialects) everything was heard; else the beginning is missing
            self.doubtful = sequence > 1
            return Seen("next", max(0, sequence - 1))
        if sequence == last + 1:
            return Seen("next")
        if sequence > last:
            self.doubtful = True
            return Seen("gap", sequence - last - 1)
        self.doubtful = False
        return Seen("new_life")

    def disconnect(self) -> None:
        """Note that the connection was lost: what was published meanwhile is not known."""
        if self.last is not None:
            self.doubtful = True
