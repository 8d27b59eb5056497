"""What differs between the engines' recordings: who reads their truth, and how their operators would set them up."""

from ops.replay import sglang, vllm, vllm_truth
from ops.replay.capture import Capture
from ops.replay.pipeline import Pipeline
from ops.replay.score import Score
from relays.dialects import EngineSettings


def settings_of(capture: Capture) -> EngineSettings:
    """Return what an operator of the recorded engine would have set."""
    return vllm.settings_of(capture) if capture.engine == "vllm" else sglang.settings_of(capture)


def rank_of(capture: Capture) -> int:
    """Return the data-parallel rank that was recorded."""
    return int(capture.meta.get("publisher_rank") or 0)


def refused(capture: Capture) -> Score | None:
    """Return the score of a recording whose version is refused, or None."""
    return vllm_truth.refused(capture) if capture.engine == "vllm" else sglang.refused(capture)


async def replay(capture: Capture, stack: Pipeline | None = None) -> Score:
    """Return how the predictions of one recording compare."""
    if capture.engine == "vllm":
        return await vllm_truth.replay_vllm(capture, stack)
    return await sglang.replay_sglang(capture, stack)
