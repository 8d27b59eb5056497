"""Broken messages of stores by the ten thousand: each is refused or read, quickly, and none harms its neighbours."""

import time
from collections import Counter

import pytest

from relays.cache.block_table import Limits
from relays.dialects import PoolSettings
from relays.llmd import decode_llmd
from relays.mooncake import KeyPattern, decode_mooncake
from relays.stores import StoreMessage
from schemas.errors import FrameError
from tests.support.mutations import Mutator
from tests.support.pool_frames import file_message, frames, keys_of, object_event, object_message
from tests.support.pool_world import PoolWorld
from tests.support.store_samples import store_samples

MESSAGES = 100_000
SEED = 20260202
MOST_S = 0.050  # of processor time, for one message
LIMITS = Limits(blocks=5_000, idle_hashes=1_000, unplaced_blocks=1_000)
TOPIC = b"kv@SHARED_STORAGE@m"


def payloads(kind: str) -> list[bytes]:
    """Return honest payloads of a store."""
    if kind == "llmd":
        mine = [file_message("m", ("stored", list(range(40))), ("removed", [3]))[2]]
    else:
        keys = keys_of("m", range(9), [0, 1])
        mine = [object_message(*(object_event("stored", key) for key in keys))[2]]
    return mine + [payload for _, _, payload in store_samples(kind)]


def outcome(kind: str, pattern: KeyPattern, payload: bytes) -> str:
    """Decode a message; return `read` or the reason why it was refused."""
    try:
        message: StoreMessage = decode_llmd(TOPIC, payload) if kind == "llmd" else decode_mooncake(payload, pattern)
    except FrameError as error:
        return error.reason
    assert all(reject.reason and reject.detail for reject in message.rejects)
    return "read"


@pytest.mark.parametrize("kind", ["llmd", "mooncake"])
def test_hostile_messages_are_refused_or_read_and_are_bounded(kind: str) -> None:
    """Each one within 50 ms; what the pool's relay remembers of them stays within its limits."""
    broken = Mutator(payloads(kind), SEED)
    pattern = KeyPattern()
    world = PoolWorld(kind, PoolSettings(block_size=4, hash_seed="0", tp_size=1), limits=LIMITS)
    world.catch_up()
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    for number in range(MESSAGES):
        payload = broken.broken()
        started_s = time.thread_time()
        outcomes[outcome(kind, pattern, payload)] += 1
        slowest_s = max(slowest_s, time.thread_time() - started_s)
        world.hear(frames(TOPIC if kind == "llmd" else b"", number + 1, payload))
    assert outcomes.total() == MESSAGES
    assert outcomes["read"] > MESSAGES // 10
    assert outcomes["batch_malformed"] > MESSAGES // 10
    assert slowest_s < MOST_S
    mirror = world.source.pool.mirror
    assert mirror.unplaced_blocks <= LIMITS.unplaced_blocks
    assert mirror.blocks <= LIMITS.blocks


def test_a_long_key_is_read_in_time() -> None:
    """Whatever stands in it: the pattern's parts are bounded."""
    pattern = KeyPattern()
    for part in ("@tp1", "@tp1@pcp1@dcp1", "a", "@", "@tp_rank:0@group:0@f"):
        started_s = time.thread_time()
        pattern.read(part * (1_000_000 // len(part)))
        assert time.thread_time() - started_s < 1.0
