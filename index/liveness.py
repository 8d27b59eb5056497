"""How far a holder is believed: what its relay said last, and how long ago; pure (DESIGN 5)."""

from typing import NamedTuple

from index.store import HolderRow
from schemas.events import HolderState

BELIEVED: frozenset[HolderState] = frozenset({"live", "catching_up", "stale", "silent"})
"""States whose blocks are counted; in the others every block may be gone."""


class Judgement(NamedTuple):
    """A holder's state and why it is not simply live."""

    state: HolderState
    reasons: tuple[str, ...] = ()


def judge(row: HolderRow, *, stale_after_s: float, unknown_after_s: float) -> Judgement:
    """Return the state that answers carry; silence makes a holder stale, then unknown."""
    if row.broken:
        return Judgement("unknown", ("records_lost",))
    if row.age_s is None:
        return Judgement("unknown", ("no_heartbeat",))
    if row.age_s > unknown_after_s:
        return Judgement("unknown", ("relay_silent",))
    reasons = (row.reason,) if row.reason else ()
    if row.age_s > stale_after_s and row.state not in ("unknown", "gone"):
        return Judgement("stale", ("relay_silent", *reasons))
    return Judgement(row.state, reasons)
