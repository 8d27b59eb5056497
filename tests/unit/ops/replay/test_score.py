"""The arithmetic of a replay's score."""

import pytest

from ops.replay.score import Score, total


def test_an_exact_request_counts_as_one() -> None:
    """A prediction that equals the engine's count is exact, and covers all of it."""
    score = Score(capture="c")
    score.compare("step 1 a", 64, 64)
    assert (score.compared, score.exact, score.coverage, score.over_credit) == (1, 1, 1.0, 0.0)
    assert score.misses == []


def test_coverage_and_over_credit_are_ratios_of_sums() -> None:
    """Coverage is what was met over what was delivered, over-credit the excess over what was predicted."""
    score = Score(capture="c")
    score.compare("step 1 a", 96, 64)  # 32 too much
    score.compare("step 2 b", 0, 32)  # 32 too little
    score.compare("step 3 c", 64, 64)
    assert (score.compared, score.exact, score.over_tokens, score.under_tokens) == (3, 1, 32, 32)
    assert score.coverage == pytest.approx((64 + 0 + 64) / (64 + 32 + 64))
    assert score.over_credit == pytest.approx(32 / (96 + 0 + 64))
    assert score.misses == ["step 1 a: predicted 96, engine 64", "step 2 b: predicted 0, engine 32"]


def test_nothing_delivered_is_covered_and_nothing_predicted_is_no_credit() -> None:
    """Ratios without a denominator are the harmless value."""
    score = Score(capture="c")
    score.compare("a", 0, 0)
    assert (score.coverage, score.over_credit) == (1.0, 0.0)
    score.compare("b", 32, 0)
    assert (score.coverage, score.over_credit) == (1.0, 1.0)


def test_device_and_host_tables_are_counted_apart() -> None:
    """Each step's table is a state of its own kind, and a different one is named."""
    score = Score(capture="c")
    score.compare_state("step 1", True)
    score.compare_state("step 1", False, host=True)
    score.compare_state("step 2", True, host=True)
    assert (score.states, score.states_equal, score.host_states, score.host_states_equal) == (1, 1, 2, 1)
    assert score.misses == ["step 1: host table differs"]


def test_what_is_left_out_is_counted_by_its_cause() -> None:
    """An excluded request does not enter any sum."""
    score = Score(capture="c")
    score.exclude("same_step")
    score.exclude("same_step")
    score.exclude("queued_clear")
    assert score.excluded == {"same_step": 2, "queued_clear": 1}
    assert score.compared == 0


def test_only_the_first_misses_are_told() -> None:
    """At most twenty misses are written out."""
    score = Score(capture="c")
    for number in range(50):
        score.compare(f"{number}", 1, 0)
    assert len(score.misses) == 20


def test_the_total_adds_sums_and_not_ratios() -> None:
    """A total's ratios come from the summed tokens, however the captures' sizes differ."""
    small, large = Score(capture="a"), Score(capture="b")
    small.compare("x", 0, 10)
    small.exclude("same_step")
    large.compare("y", 1000, 990)
    large.compare_state("s", True)
    large.exclude("same_step")
    row = total([small, large])
    assert (row.capture, row.compared, row.exact, row.states) == ("total", 2, 0, 1)
    assert row.coverage == pytest.approx(990 / 1000)
    assert row.over_credit == pytest.approx(10 / 1000)
    assert row.excluded == {"same_step": 2}


def test_the_total_of_nothing_is_harmless() -> None:
    """No captures give a row of zeros."""
    row = total([])
    assert (row.compared, row.coverage, row.over_credit) == (0, 1.0, 0.0)
