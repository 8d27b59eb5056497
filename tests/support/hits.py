"""A holder's residency as a drawing, one character a block of the unit, and what it then reaches."""

from collections.abc import Sequence

from index.match import Reach, Run, reusable_tokens
from index.rules import make_rules
from schemas.profiles import Profile


def runs_of(residencies: Sequence[int]) -> list[Run]:
    """Return the runs of a list that holds each block's residency, 0 for a hole."""
    runs: list[Run] = []
    for number, residency in enumerate(residencies):
        last = runs[-1] if runs else None
        if not residency:
            continue
        if last and last.start + last.length == number and last.residency == residency:
            runs[-1] = Run(last.start, last.length + 1, residency)
        else:
            runs.append(Run(number, 1, residency))
    return runs


def drawn(drawing: str) -> list[int]:
    """Return the residencies that a drawing shows: a digit (hexadecimal) is a residency, a dot a hole."""
    return [0 if mark == "." else int(mark, 16) for mark in drawing]


def reach(profile: Profile, drawing: str, prompt_tokens: int, *, whole_prompt: bool = False) -> Reach:
    """Return the hit of a prompt on a holder that is drawn."""
    return reusable_tokens(runs_of(drawn(drawing)), make_rules(profile), prompt_tokens, whole_prompt=whole_prompt)


def hit(profile: Profile, drawing: str, prompt_tokens: int) -> int:
    """Return the hit's tokens."""
    return reach(profile, drawing, prompt_tokens).tokens
