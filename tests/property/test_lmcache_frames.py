"""Broken messages of LMCache's stream: each is refused with a reason or read, and none raises anything else."""

import time
from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from relays.cache.block_table import Limits
from relays.lmcache_mp import lmcache_profile
from relays.mirror import Mirror
from schemas.errors import FrameError
from schemas.lmcache_mp import KVEventBatch
from tests.support.lmcache_frames import CHUNK, MODEL, frames, read
from tests.support.mutations import broken

MESSAGES = 100_000
MOST_S = 0.25  # of processor time, for one message through decoder and mirror

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NAMES = st.binary(max_size=66) | st.sampled_from([bytes([n]) * 32 for n in range(4)])
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "seq": st.integers(-2, 8) | INT64,
        "kind": st.sampled_from(["stored", "removed", "lost", ""]) | st.text(max_size=5),
        "medium": st.sampled_from(["CPU", "GPU", ""]),
        "model_name": st.sampled_from([MODEL, "", "other"]),
        "block_hashes": st.lists(NAMES, max_size=4),
        "parent_block_hash": NAMES,
        "token_ids": st.lists(st.integers(-1, 3) | INT64, max_size=9),
    },
)
BATCHES = st.fixed_dictionaries(
    {"events": st.lists(RECORDS, max_size=5)},
    optional={"enabled": st.booleans(), "incarnation": INT64, "next_cursor": INT64, "lost": st.booleans()},
)


def outcome(mirror: Mirror, payload: bytes, chunk: int = CHUNK) -> str:
    """Decode and mirror a message; return `read` or the reason why it was refused."""
    try:
        batch = read(payload, chunk=chunk)
    except FrameError as error:
        return error.reason
    assert all(reject.reason and reject.detail for reject in batch.decoded.rejects)
    mirror.apply(batch.decoded.events)
    return "read"


def test_mutated_messages_of_the_real_server_are_refused_or_read() -> None:
    """Bits, lengths and ends of recorded messages are changed; each takes bounded time and leaves a usable mirror."""
    random = Random(20261129)
    payloads = frames("plain", "tp2", "lives")
    mirror = Mirror(lmcache_profile(MODEL, "node7"), limits=Limits(blocks=5_000, pending_blocks=1_000))
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    for _ in range(MESSAGES):
        payload = broken(payloads, random)
        started_s = time.thread_time()
        outcomes[outcome(mirror, payload)] += 1
        slowest_s = max(slowest_s, time.thread_time() - started_s)
        mirror.take_runs(1 << 20)
    assert outcomes.total() == MESSAGES
    assert set(outcomes) <= {"read", "batch_malformed", "sequence"}
    assert min(outcomes["read"], outcomes["batch_malformed"]) > MESSAGES // 10
    assert slowest_s < MOST_S


@given(BATCHES, st.booleans())
@settings(deadline=None)
def test_any_values_in_a_batch_are_refused_or_read(fields: dict[str, Any], numbered: bool) -> None:
    """Well-formed messages with whatever numbers, names and texts."""
    if numbered:  # so that each record is looked at
        fields["events"] = [{**record, "seq": number} for number, record in enumerate(fields["events"], 1)]
        fields["next_cursor"] = len(fields["events"])
    mirror = Mirror(lmcache_profile(MODEL, "node7", 4))
    assert outcome(mirror, KVEventBatch(**fields).SerializeToString(), chunk=4)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_refused_or_read(payload: bytes) -> None:
    """Bytes that no server meant."""
    assert outcome(Mirror(lmcache_profile(MODEL, "node7")), payload)
