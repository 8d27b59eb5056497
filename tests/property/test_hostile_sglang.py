"""Broken SGLang messages by the ten thousand: each is refused or read, quickly, and none harms its neighbours."""

import gc
import resource
import time
from collections import Counter
from typing import Any

import pytest

from index.digests import index_digest
from relays.cache.block_table import Limits
from relays.dialects import EngineSettings, sglang_profile
from relays.engine import EngineRank
from schemas.errors import FrameError
from schemas.profiles import Holder
from tests.support.mutations import Mutator
from tests.support.sglang_frames import CASES, recorded_messages

MESSAGES = 60_000
SEED = 20260202
LIMITS = Limits(blocks=20_000, idle_hashes=1_000, pending_blocks=2_000)
MOST_S = 0.050  # of processor time, for one message through decoder and mirror
MOST_KB = 300_000  # more than at the start, for all of them
VERSIONS = ("0.5.10.post1", "0.5.18", "0.5.23")


def rank(version: str, **settings: Any) -> EngineRank:
    profile = sglang_profile("m", "r", version, EngineSettings(**settings))
    return EngineRank(profile, Holder("r", 0), life=1, limits=LIMITS)


def recorded(version: str) -> list[bytes]:
    """Return the recorded payloads of a version."""
    return [message.payload for message in recorded_messages() if message.version == version]


def digest(engine: EngineRank) -> int:
    return index_digest(engine.mirror.resident())


@pytest.mark.slow
def test_hostile_messages_are_refused_or_read_and_harm_nobody() -> None:
    """Each mutated message is refused with a reason or decoded, within 50 ms and bounded memory; an engine that
    speaks beside them is mirrored as if it were alone.
    """
    honest = [(rank(version), recorded(version)) for version in VERSIONS]
    # units learnt, a quarter of the engine's pages, pairs known before, and a tier in doubt
    hostile = [rank("0.5.23"), rank("0.5.23", block_size=4), rank("0.5.23", drafting="eagle", block_size=16)]
    hostile += [rank("0.5.18"), rank("0.5.10.post1", hicache=True, block_size=1)]
    payloads = [message.payload for message in recorded_messages()] + [case.payload for case in CASES if case.events]
    broken = Mutator(payloads, SEED)
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    gc.freeze()  # what other tests left behind is not searched while a message is timed
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(MESSAGES):
        engine = hostile[number % len(hostile)]
        payload = broken.broken()
        started_s = time.thread_time()
        outcomes[outcome(engine, number, payload)] += 1
        slowest_s = max(slowest_s, time.thread_time() - started_s)
        for neighbour, said in honest:
            if number < len(said):
                neighbour.take(number, said[number])
        if number % 50 == 0:
            list(engine.speak())
    gc.unfreeze()
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb
    for version, (neighbour, said) in zip(VERSIONS, honest, strict=True):
        alone = rank(version)
        for sequence, payload in enumerate(said):
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
