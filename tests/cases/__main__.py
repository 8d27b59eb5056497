"""`python -m tests.cases FILE...`: one line a case with what became of it, and 1 where one failed."""

import asyncio
import sys
from pathlib import Path

from tests.cases.notation import read_cases
from tests.cases.profiles import NoDecoderError
from tests.cases.world import run_case


def main(paths: list[str]) -> int:
    """Run the exact cases of the files."""
    failed = False
    for case in [case for path in paths for case in read_cases(Path(path))]:
        if case.kind != "exact":
            print_line(case.id, case.kind, case.title)
            continue
        try:
            outcome = asyncio.run(run_case(case))
        except NoDecoderError as error:
            print_line(case.id, "skip", str(error))
            continue
        failed |= bool(outcome.failures)
        print_line(case.id, "fail" if outcome.failures else "pass", "; ".join(outcome.failures))
        if outcome.unread:
            print_line("", "unread", ", ".join(outcome.unread))
    return 1 if failed else 0


def print_line(*words: str) -> None:
    """Write one line to stdout."""
    sys.stdout.write("  ".join(words).rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
