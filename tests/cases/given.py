"""The file of cases that a run is about: KVATLAS_CASES, or the one beside the repository."""

import os
from pathlib import Path

from tests.cases.notation import Case, read_cases

_ROOT = Path(__file__).parents[2]


def cases_path() -> Path:
    """Return where the cases are looked for; a relative path begins at the repository's root."""
    return _ROOT / os.environ.get("KVATLAS_CASES", "../shared/cases/cases.jsonl")


def given_cases(kind: str) -> list[Case]:
    """Return the given cases of a kind; none where there is no file."""
    path = cases_path()
    return [case for case in read_cases(path) if case.kind == kind] if path.is_file() else []
