"""Pauses double up to a bound, and begin again."""

from ops.pauses import Pauses


def test_pauses_grow_and_begin_again() -> None:
    pauses = Pauses(0.2, 1.0)
    assert [pauses.next_s() for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    pauses.reset()
    assert [pauses.next_s() for _ in range(2)] == [0.2, 0.4]
