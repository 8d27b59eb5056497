"""Broken SGLang messages by the ten thousand: each is refused or read, quickly, and none harms its neighbours."""

from functools import partial
from typing import Any

import pytest

from relays.dialects import EngineSettings, sglang_profile
from relays.engine import EngineRank
from schemas.profiles import Holder
from tests.support.hostile import LIMITS, Honest, check_hostile
from tests.support.mutations import Mutator
from tests.support.sglang_frames import CASES, recorded_messages

MESSAGES = 100_000
SEED = 20260202
VERSIONS = ("0.5.10.post1", "0.5.18", "0.5.23")


def rank(version: str, **settings: Any) -> EngineRank:
    profile = sglang_profile("m", "r", version, EngineSettings(**settings))
    return EngineRank(profile, Holder("r", 0), life=1, limits=LIMITS)


def recorded(version: str) -> list[bytes]:
    """Return the recorded payloads of a version."""
    return [message.payload for message in recorded_messages() if message.version == version]


@pytest.mark.slow
def test_hostile_messages_are_refused_or_read_and_harm_nobody() -> None:
    """Each mutated message is refused with a reason or decoded, within 50 ms and bounded memory; an engine that
    speaks beside them is mirrored as if it were alone.
    """
    honest = [Honest(partial(rank, version), recorded(version)) for version in VERSIONS]
    # units learnt, a quarter of the engine's pages, pairs known before, and a tier in doubt
    hostile = [rank("0.5.23"), rank("0.5.23", block_size=4), rank("0.5.23", drafting="eagle", block_size=16)]
    hostile += [rank("0.5.18"), rank("0.5.10.post1", hicache=True, block_size=1)]
    payloads = [message.payload for message in recorded_messages()] + [case.payload for case in CASES if case.events]
    check_hostile(hostile, honest, Mutator(payloads, SEED), MESSAGES)
