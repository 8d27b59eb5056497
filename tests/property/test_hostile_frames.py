"""A hundred thousand broken vLLM messages: each is refused or read, quickly, and none harms its neighbours."""

import resource
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from index.digests import index_digest
from ops.replay.capture import Capture, load_capture
from ops.replay.vllm import profile_of
from relays.cache.block_table import Limits
from relays.engine import EngineRank
from schemas.errors import FrameError
from schemas.profiles import Holder
from tests.support.captures import short_recordings
from tests.support.mutations import Mutator

MESSAGES = 100_000
SEED = 20260101
LIMITS = Limits(blocks=20_000, idle_hashes=1_000, pending_blocks=2_000)
MOST_S = 0.050  # of processor time, for one message through decoder and mirror
MOST_KB = 300_000  # more than at the start, for all of them


def rank(capture: Capture, **changes: Any) -> EngineRank:
    profile = msgspec.structs.replace(profile_of(capture), **changes)
    return EngineRank(profile, Holder(capture.name, 0), life=1, limits=LIMITS)


def digest(engine: EngineRank) -> int:
    return index_digest(engine.mirror.resident())


@pytest.mark.slow
def test_hostile_messages_are_refused_or_read_and_harm_nobody() -> None:
    """Each mutated message is refused with a reason or decoded, within 50 ms and bounded memory; an engine that
    speaks beside them is mirrored as if it were alone.
    """
    captures = [load_capture(folder) for folder in short_recordings()]
    honest = [(rank(capture), [frame.parts[2] for frame in capture.published]) for capture in captures]
    # as they were, and with an index block of a quarter of the engine's
    hostile = [*(rank(capture) for capture in captures), *(rank(capture, unit=8, groups=()) for capture in captures)]
    broken = Mutator([payload for _, payloads in honest for payload in payloads], SEED)
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(MESSAGES):
        engine, (neighbour, payloads) = hostile[number % len(hostile)], honest[number % len(honest)]
        payload = broken.broken()
        started_s = time.thread_time()
        outcomes[outcome(engine, number, payload)] += 1
        slowest_s = max(slowest_s, time.thread_time() - started_s)
        if number < len(honest) * len(payloads):
            neighbour.take(number // len(honest), payloads[number // len(honest)])
        if number % 50 == 0:
            list(engine.speak())
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb
    for capture, (neighbour, payloads) in zip(captures, honest, strict=True):
        alone = rank(capture)
        for sequence, payload in enumerate(payloads):
            alone.take(sequence, payload)
        assert digest(neighbour) == digest(alone)
    assert all(outcomes), outcomes  # every refusal has a reason
    assert outcomes.total() == MESSAGES
    assert outcomes["read"] > MESSAGES // 10
    assert outcomes["batch_malformed"] > MESSAGES // 10
    assert slowest_s < MOST_S
    assert grown_kb < MOST_KB


def outcome(engine: EngineRank, sequence: int, payload: bytes) -> str:
    """Decode and mirror a message; return `read` or the reason why it was refused."""
    try:
        decoded = engine.decode(sequence, payload)
    except FrameError as error:
        return error.reason
    assert all(reject.reason and reject.detail is not None for reject in decoded.rejects)
    engine.mirror.apply(decoded.events)
    return "read"
