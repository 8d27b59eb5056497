"""How far a holder is believed."""

import pytest

from index.liveness import BELIEVED, Judgement, judge
from index.store import HolderRow
from schemas.events import HolderState
from tests.support.engines import HOLDER


def row(age_s: float | None, state: HolderState = "live", *, broken: bool = False, reason: str = "") -> HolderRow:
    return HolderRow(
        holder=HOLDER, life=1, epoch=0, sequence=1, broken=broken, applied={}, state=state, reason=reason, age_s=age_s
    )


JUDGED = [
    (row(0.0), Judgement("live")),
    (row(3.0), Judgement("live")),
    (row(3.1), Judgement("stale", ("relay_silent",))),
    (row(10.1), Judgement("unknown", ("relay_silent",))),
    (row(None), Judgement("unknown", ("no_heartbeat",))),
    (row(0.0, broken=True), Judgement("unknown", ("records_lost",))),
    (row(0.0, "catching_up"), Judgement("catching_up")),
    (row(0.0, "stale", reason="disconnected"), Judgement("stale", ("disconnected",))),
    (row(4.0, "stale", reason="disconnected"), Judgement("stale", ("relay_silent", "disconnected"))),
    (row(4.0, "gone"), Judgement("gone")),
    (row(4.0, "unknown", reason="disconnected"), Judgement("unknown", ("disconnected",))),
]


@pytest.mark.parametrize(("seen", "judgement"), JUDGED)
def test_silence_makes_a_holder_stale_and_then_unknown(seen: HolderRow, judgement: Judgement) -> None:
    """A holder is what its relay said, until the relay is silent or its records were lost."""
    assert judge(seen, stale_after_s=3.0, unknown_after_s=10.0) == judgement


def test_what_may_all_be_gone_is_not_believed() -> None:
    """Blocks of unknown and gone holders do not count."""
    assert {"live", "catching_up", "stale", "silent"} == BELIEVED
