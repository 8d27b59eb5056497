"""The runner compares what it is told to, and passes nothing over."""

from typing import Any

import msgspec
import pytest

from tests.cases.given import given_cases
from tests.cases.notation import Case, NotationError, read_steps
from tests.cases.profiles import NoDecoderError
from tests.cases.world import Outcome, run_case

CASES = [pytest.param(case, id=case.id) for case in given_cases("exact")]


async def run(*steps: dict[str, Any], profile: dict[str, Any] | None = None) -> Outcome:
    return await run_case(Case(id="X", kind="exact", profile=profile, steps=list(steps)))


@pytest.mark.parametrize("case", CASES)
async def test_other_numbers_fail(case: Case) -> None:
    """A case whose every number is one token more fails in as many places as it has numbers."""
    numbers = 0
    steps: list[dict[str, Any]] = []
    for step in case.steps:
        want = step.get("want")
        if isinstance(want, dict) and all(isinstance(figures, dict) for figures in want.values()):
            numbers += sum(map(len, want.values()))
            want = {name: {figure: _one_more(n) for figure, n in figures.items()} for name, figures in want.items()}
        steps.append({**step, "want": want} if want else step)
    try:
        before = await run_case(case)
        after = await run_case(msgspec.structs.replace(case, steps=steps))
    except NoDecoderError as error:
        pytest.skip(str(error))
    if before.failures:
        pytest.skip("fails as it is: see test_exact.py")
    assert len(after.failures) == numbers


def _one_more(number: Any) -> Any:
    return max(number) + 1 if isinstance(number, list) else number + 1 if isinstance(number, int) else -1


async def test_a_case_that_asks_nothing_fails() -> None:
    """A case without questions proves nothing."""
    outcome = await run({"from": "e1", "ev": []}, {"note": "and so on"})
    assert outcome.failures == ["nothing was asked"]


async def test_a_question_of_another_kind_fails() -> None:
    """A question that needs a harness of its own is not taken for answered."""
    outcome = await run({"ask": "in_flight", "want": {"e1": 0}})
    assert outcome.failures == ["steps[0]: the question 'in_flight' needs a harness of its own"]


async def test_what_nobody_reads_is_noted() -> None:
    """Fields of a profile, a message, an event and a control that are not of the notation are listed by their place."""
    outcome = await run(
        {"from": "e1", "weather": 1, "ev": [{"op": "store", "h": ["a"], "tok": "1..4", "mood": 2}, {"op": "sing"}]},
        {"ctl": "eclipse", "from": "e1"},
        {"ask": "match", "tok": "1..4", "want": {"e1/0": {"gpu": 4}}},
        profile={"colour": "red"},
    )
    assert outcome.failures == []
    assert outcome.unread == [
        "steps[0].weather",
        "steps[0].ev[0].mood",
        "steps[0].ev[1].op: sing",
        "profile.colour",
        "steps[1].ctl: eclipse",
    ]


def test_a_step_that_is_not_of_the_notation_is_named() -> None:
    """Tokens that are words raise with the step's position."""
    case = Case(id="X", kind="exact", steps=[{"ask": "match", "tok": "the same tokens", "want": {}}])
    with pytest.raises(NotationError, match=r"X: steps\[0\]"):
        read_steps(case, [])
