"""Broken messages by the ten thousand, for engines that must refuse or read each and harm nobody."""

import gc
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from index.digests import index_digest
from relays.cache.block_table import Limits
from relays.engine import EngineRank
from schemas.errors import FrameError
from tests.support.mutations import Mutator

LIMITS = Limits(blocks=20_000, idle_hashes=1_000, pending_blocks=2_000)
MOST_S = 0.050  # of processor time, for one message through decoder and mirror
MOST_KB = 300_000  # more than at the start, for all of them


class Honest(NamedTuple):
    """An engine that speaks beside the broken ones."""

    new_rank: Callable[[], EngineRank]
    payloads: Sequence[bytes]


def check_hostile(hostile: Sequence[EngineRank], honest: Sequence[Honest], broken: Mutator, messages: int) -> None:
    """Check that each message is refused with a reason or read, within 50 ms and bounded memory.

    Args:
        hostile: take the broken messages in turn.
        honest: are mirrored as if each were alone.
    """
    neighbours = [(engine.new_rank(), engine) for engine in honest]
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    gc.freeze()  # what other tests left behind is not searched while a message is timed
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(messages):
        engine, payload = hostile[number % len(hostile)], broken.broken()
        started_s = time.thread_time()
        outcomes[_outcome(engine, number, payload)] += 1
        slowest_s = max(slowest_s, time.thread_time() - started_s)
        for neighbour, (_, said) in neighbours:
            if number < len(said):
                neighbour.take(number, said[number])
        if number % 50 == 0:
            list(engine.speak())
    gc.unfreeze()
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb
    for neighbour, (new_rank, said) in neighbours:
        alone = new_rank()
        for sequence, payload in enumerate(said):
            alone.take(sequence, payload)
        assert _digest(neighbour) == _digest(alone)
    assert all(outcomes), outcomes  # every refusal has a reason
    assert outcomes.total() == messages
    assert outcomes["read"] > messages // 10
    assert outcomes["batch_malformed"] > messages // 10
    assert slowest_s < MOST_S
    assert grown_kb < MOST_KB


def _digest(engine: EngineRank) -> int:
    return index_digest(engine.mirror.resident())


def _outcome(engine: EngineRank, sequence: int, payload: bytes) -> str:
    """Decode and mirror a message; return `read` or the reason why it was refused."""
    try:
        decoded = engine.decode(sequence, payload)
    except FrameError as error:
        return error.reason
    assert all(reject.reason and reject.detail is not None for reject in decoded.rejects)
    engine.mirror.apply(decoded.events)
    return "read"
