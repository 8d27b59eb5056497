"""The order of a rank whose events must be asked for: gaps, lost answers, restarts and windows."""

from typing import Any

from relays.pulled import Heard, PulledSequence

FULL, SMALL, LARGER = 4096, 256, 8192
FOLLOWS, PASSED = Heard(None, applies=True), Heard(None, applies=False)


def heard(sequence: PulledSequence, *numbers: int, window: int | None = FULL, **how: Any) -> list[Heard]:
    return [sequence.take(number, window, created=how.get("created", False)) for number in numbers]


def test_numbers_that_follow_each_other_are_one_life() -> None:
    """Whatever the first number is, for others may have asked before us."""
    assert heard(PulledSequence(), 0, 1, 2) == [FOLLOWS] * 3
    assert heard(PulledSequence(), 700, 701) == [FOLLOWS] * 2


def test_a_number_that_is_missing_ends_the_life() -> None:
    """What lay between is lost for good, so everything known is; what follows is a life again."""
    assert heard(PulledSequence(), 3, 5, 6) == [FOLLOWS, Heard("gap", applies=True), FOLLOWS]


def test_a_number_that_goes_back_ends_the_life() -> None:
    """An engine counts from 0 again after a restart; the same number twice is one too."""
    sequence = PulledSequence()
    assert heard(sequence, 3, 0, 1) == [FOLLOWS, Heard("sequence_back", applies=True), FOLLOWS]
    assert heard(sequence, 1) == [Heard("sequence_back", applies=True)]


def test_after_a_failed_poll_the_next_number_decides() -> None:
    """A poll that failed leaves the rank in doubt; a number that follows ends the doubt and keeps the life."""
    sequence = PulledSequence()
    heard(sequence, 0)
    sequence.doubt()
    assert sequence.doubtful
    assert heard(sequence, 1) == [FOLLOWS]
    assert not sequence.doubtful
    sequence.doubt()
    assert heard(sequence, 4) == [Heard("gap", applies=True)]
    assert not sequence.doubtful


def test_only_the_largest_window_applies() -> None:
    """Every window repeats the events of its blocks; the numbers run through all of them."""
    sequence = PulledSequence()
    assert heard(sequence, 0) == [FOLLOWS]
    assert heard(sequence, 1, window=SMALL) == [PASSED]
    assert heard(sequence, 2) == [FOLLOWS]
    assert sequence.windows == (FULL, SMALL)


def test_windows_that_are_set_beforehand_are_known_from_the_start() -> None:
    """A smaller window's events count for nothing even before the largest one speaks."""
    sequence = PulledSequence((FULL, SMALL))
    assert heard(sequence, 0, window=SMALL) == [PASSED]


def test_a_larger_window_ends_the_life() -> None:
    """What was credited before was the copy of a window that is not the largest."""
    sequence = PulledSequence()
    assert heard(sequence, 0, 1) == [FOLLOWS] * 2
    assert heard(sequence, 2, window=LARGER) == [Heard("larger_window", applies=True)]
    assert heard(sequence, 3) == [PASSED]
    assert sequence.windows == (LARGER, FULL)


def test_windows_that_are_made_at_the_start_end_nothing() -> None:
    """The pools are announced one after the other, in any order, before there are blocks."""
    sequence = PulledSequence()
    assert heard(sequence, 0, window=SMALL, created=True) == [FOLLOWS]
    assert heard(sequence, 1, window=FULL, created=True) == [FOLLOWS]
    assert heard(sequence, 2, window=SMALL) == [PASSED]
    assert heard(sequence, 3) == [FOLLOWS]


def test_a_gap_and_a_larger_window_at_once_end_one_life() -> None:
    """The gap has already ended what the larger window would end."""
    sequence = PulledSequence()
    heard(sequence, 0)
    assert heard(sequence, 9, window=LARGER) == [Heard("gap", applies=True)]
    assert heard(sequence, 10, window=LARGER) == [FOLLOWS]


def test_a_release_without_windows_has_one() -> None:
    """Events that name no window are about the only one."""
    sequence = PulledSequence()
    assert heard(sequence, 0, 1, window=None) == [FOLLOWS] * 2
    assert sequence.windows == ()
