"""What a check found, rule by rule."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Verdict = Literal["fit", "note", "unseen", "unfit"]


class Finding(msgspec.Struct, frozen=True):
    """One rule and what was seen of it; only `unfit` makes the whole unfit."""

    rule: str
    verdict: Verdict
    text: str
    mend: str = ""  # what an operator would change


def is_fit(findings: Iterable[Finding]) -> bool:
    """Return whether nothing stands against the engine, and something was seen of it at all."""
    verdicts = [finding.verdict for finding in findings]
    return "unfit" not in verdicts and "fit" in verdicts


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines for a terminal."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.verdict:<7} {finding.rule:<12} {finding.text}")
        if finding.mend:
            lines.append(f"{'':<20} -> {finding.mend}")
    return lines
