"""What differs between the engines' recordings: who reads their truth, and how their operators would set them up."""

from ops.replay import sglang, vllm_meta, vllm_truth
from ops.replay.capture import Capture
from ops.replay.pipeline import Pipeline
from ops.replay.ranks import parts_of
from ops.replay.score import Score, total
from relays.dialects import EngineSettings


def settings_of(capture: Capture) -> EngineSettings:
    """Return what an operator of the recorded engine would have set."""
    return vllm_meta.settings_of(capture) if capture.engine == "vllm" else sglang.settings_of(capture)


def refused(capture: Capture) -> Score | None:
    """Return the score of a recording whose version is refused, or None."""
    return vllm_truth.refused(capture) if capture.engine == "vllm" else sglang.refused(capture)


async def replay(capture: Capture, stack: Pipeline | None = None) -> Score:
    """Return how the predictions of one recording compare, those of several ranks together.

    Raises:
        ConfigError: the recording lacks what its kind has.
    """
    if capture.engine != "vllm":
        return await sglang.replay_sglang(capture, stack)
    scores = [await vllm_truth.replay_vllm(part, stack) for part in parts_of(capture)]
    return scores[0] if len(scores) == 1 else total(scores, capture.name)
