"""Every exact case of the given file: each question's numbers come out of the index."""

import os

import pytest

from tests.cases.given import cases_path, given_cases
from tests.cases.notation import Case
from tests.cases.profiles import NoDecoderError
from tests.cases.world import run_case


def test_the_cases_are_there() -> None:
    """A file that is named must be there."""
    if not cases_path().is_file():
        refuse = pytest.fail if os.environ.get("KVATLAS_CASES") else pytest.skip
        refuse(f"no cases: {cases_path()}")
    assert given_cases("exact")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in given_cases("exact")])
async def test_the_numbers_of_a_case_come_out(case: Case) -> None:
    """What relay, fold and match answer is what the case wants."""
    try:
        outcome = await run_case(case)
    except NoDecoderError as error:
        pytest.skip(str(error))
    assert outcome.failures == []
