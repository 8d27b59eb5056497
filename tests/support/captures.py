"""Where the recordings are: three short ones beside the tests, all others in a folder outside the repository."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ROOT / "tests" / "data" / "vllm"
CAPTURES = Path(os.environ.get("KVATLAS_CAPTURES") or ROOT / ".." / "shared" / "captures")


def short_recordings() -> list[Path]:
    """Return the recordings that are always there."""
    return _recordings(SHORT)


def long_recordings() -> list[Path]:
    """Return the recordings of the captures' folder, or of its engines' folders; none where there is no such folder."""
    return [
        *_recordings(CAPTURES),
        *(found for engine in ("vllm", "sglang") for found in _recordings(CAPTURES / engine)),
    ]


def recording_of(engine: str, name: str) -> Path:
    """Return where a recording is, or skip the test where it is not at hand."""
    for root in (ROOT / "tests" / "data" / engine, CAPTURES, CAPTURES / engine):
        if (root / name).exists():
            return root / name
    pytest.skip(f"no recording {name}; KVATLAS_CAPTURES names their folder")


def _recordings(folder: Path) -> list[Path]:
    return sorted(meta.parent for meta in folder.glob("*/meta.json"))
