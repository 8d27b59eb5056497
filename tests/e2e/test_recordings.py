"""Recorded engine traffic in process: predictions beside the engine's own counts, tables beside its tables."""

import os
from pathlib import Path

import pytest

from ops.replay.capture import load_capture
from ops.replay.recordings import refused, replay
from ops.replay.score import Score
from tests.support.captures import CAPTURES, long_recordings, recording_of, short_recordings
from tests.support.reencoded import as_version

# what the three short recordings hold; a change here is a change of what is compared, not of what is right
COMPARED = {"0.14.1-salt-lora": (10, 88), "0.32.0-salt-lora": (12, 88), "0.32.0-mm-llava": (10, 60)}


def check(score: Score) -> None:
    """Assert that all that was compared is equal; an answer marked as an upper bound may only be above."""
    assert score.states_equal == score.states, score.misses
    assert score.host_states_equal == score.host_states, score.misses
    assert score.under_tokens == 0, score.misses
    assert score.exact == score.compared or score.marked, score.misses


@pytest.mark.parametrize("folder", short_recordings(), ids=lambda folder: folder.name)
async def test_a_short_recording_is_predicted_exactly(folder: Path) -> None:
    """Every comparable request of the recordings in this repository is predicted to the token."""
    score = await replay(load_capture(folder))
    check(score)
    assert (score.compared, score.states) == COMPARED[folder.name]
    assert score.exact == score.compared


@pytest.mark.parametrize("folder", long_recordings(), ids=lambda folder: folder.name)
async def test_a_recording_is_predicted_exactly(folder: Path) -> None:
    """Every comparable request of every recording at hand is predicted to the token, and most are comparable."""
    capture = load_capture(folder)
    if refused(capture) is not None:
        pytest.skip(f"{capture.engine} {capture.version} is refused by its version")
    score = await replay(capture)
    check(score)
    assert score.compared >= max(1, sum(score.excluded.values()))


@pytest.mark.parametrize("version", ["0.22.1", "0.23.0"])
async def test_chunks_that_are_told_by_name_alone_are_counted(version: str) -> None:
    """Up to 0.23, and by default later, one hash stands for a chunk of several blocks, in stores and removals alike."""
    capture = load_capture(recording_of("vllm", "0.32.0-offload-selfdesc-chunk3"))
    score = await replay(as_version(capture, version))
    check(score)
    assert (score.compared, score.exact) == (71, 71)


def test_the_recordings_are_at_hand() -> None:
    """A folder that is named must be one; without any, only the short recordings are compared."""
    if not long_recordings():
        refuse = pytest.fail if os.environ.get("KVATLAS_CAPTURES") else pytest.skip
        refuse(f"no recordings in {CAPTURES}; KVATLAS_CAPTURES names their folder")
