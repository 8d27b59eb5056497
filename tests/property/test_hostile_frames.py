"""A hundred thousand broken vLLM messages: each is refused or read, quickly, and none harms its neighbours."""

from functools import partial
from typing import Any

import msgspec
import pytest

from ops.replay.capture import Capture, load_capture
from ops.replay.vllm import profile_of
from relays.engine import EngineRank
from schemas.profiles import Holder
from tests.support.captures import short_recordings
from tests.support.hostile import LIMITS, Honest, check_hostile
from tests.support.mutations import Mutator

MESSAGES = 100_000
SEED = 20260101


def rank(capture: Capture, **changes: Any) -> EngineRank:
    profile = msgspec.structs.replace(profile_of(capture), **changes)
    return EngineRank(profile, Holder(capture.name, 0), life=1, limits=LIMITS)


@pytest.mark.slow
def test_hostile_messages_are_refused_or_read_and_harm_nobody() -> None:
    """Each mutated message is refused with a reason or decoded, within 50 ms and bounded memory; an engine that
    speaks beside them is mirrored as if it were alone.
    """
    captures = [load_capture(folder) for folder in short_recordings()]
    honest = [Honest(partial(rank, capture), [f.parts[2] for f in capture.published]) for capture in captures]
    # as they were, and with an index block of a quarter of the engine's
    hostile = [*(rank(capture) for capture in captures), *(rank(capture, unit=8, groups=()) for capture in captures)]
    broken = Mutator([payload for engine in honest for payload in engine.payloads], SEED)
    check_hostile(hostile, honest, broken, MESSAGES)
