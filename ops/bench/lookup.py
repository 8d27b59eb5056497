"""Lookups beside Dynamo's tree, call by call in turn, with every answer compared with the truth."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import redis as redis_client
import redis.asyncio as aioredis
from numpy.typing import NDArray

from index.lookup import Prompt, Question, ask, reaches
from index.match import NOTHING
from index.redis_link import Link
from index.redis_store import RedisStore
from index.walks import pieces, runs_by_slot, stretches
from ops.bench.clients import percentile
from ops.bench.dynamo import Tree
from ops.bench.traffic import UNIT, chain, holder
from ops.bench.workload import LENGTHS, Query, Workload, prompts, queries
from schemas.topics import model_slug

_CONCURRENT = 32
_WINDOWS = 8
_NOTHING = """#!lua name=kvatlas_bench
redis.register_function{function_name = 'kvatlas_bench_nothing', callback = function() return '' end,
  flags = {'no-writes'}}
"""

PARTS = ("ping", "nothing", "function", "redis_py", "decode", "find", "dynamo")
"""A PING; a function that does nothing with what a find sends; the find function through `Link`, and through redis-py's
`execute_command`; its reply made into runs by slot; `RedisStore.find`; Dynamo's `find_matches`."""


class Latencies(NamedTuple):
    """Times of single calls by part, in seconds."""

    length: int
    samples: dict[str, list[float]]

    def us(self, part: str, share: float) -> float:
        """Return what this share of the part's calls stay below, in microseconds."""
        return percentile(self.samples[part], share) * 1e6

    def ratio(self, share: float = 0.5) -> float | None:
        """Return the same of our find as a multiple of Dynamo's."""
        return self.us("find", share) / self.us("dynamo", share) if self.samples["dynamo"] else None


class Use(NamedTuple):
    """Lookups, and what they took."""

    lookups: int
    seconds: float
    cpu_s: float  # of this process
    server_cpu_s: float = 0.0  # of the Redis process

    @property
    def per_s(self) -> float:
        """Lookups a second."""
        return self.lookups / self.seconds

    @property
    def us(self) -> float:
        """CPU of a lookup, wherever it was spent, in microseconds."""
        return (self.cpu_s + self.server_cpu_s) / self.lookups * 1e6

    @property
    def server_us(self) -> float:
        """CPU of a lookup in Redis, which all routers share."""
        return self.server_cpu_s / self.lookups * 1e6


class Load(NamedTuple):
    """2048-block lookups under load: 32 of ours are always on their way, one of Dynamo's, which has no other form."""

    ours: Use
    dynamo: Use | None

    @property
    def ratio(self) -> float | None:
        """Lookups for a second of CPU, as a multiple of Dynamo's."""
        return None if self.dynamo is None else self.dynamo.us / self.ours.us

    @property
    def ratio_of_server(self) -> float | None:
        """The same for the CPU of Redis alone."""
        return None if self.dynamo is None else self.dynamo.us / self.ours.server_us


class Lookups(NamedTuple):
    """All that was measured."""

    latencies: list[Latencies]
    load: Load
    wrong: int
    dynamo_wrong: int
    checked: int


async def measure(
    redis_url: str, workload: Workload, hashes: NDArray[np.uint64], tree: Tree | None, count: int, window_s: float
) -> Lookups:
    """Return what lookups cost; each prompt is asked once with each way, in random order."""
    client = aioredis.Redis.from_url(redis_url)
    store = RedisStore([client])
    parts = _Parts(workload.model, store, client, Link(client), tree)
    latencies: list[Latencies] = []
    wrong = dynamo_wrong = 0
    try:
        await parts.link.call("FUNCTION", "LOAD", "REPLACE", _NOTHING)
        rows = await store.holders(workload.model)
        questions = [ask(row.holder, row.profile) for row in rows if row.profile is not None]
        for length in LENGTHS:
            asked = queries(workload, length, count, seed=1)
            chains = [chain(hashes, query.blocks) for query in asked]
            others = [chain(hashes, blocks) for blocks in prompts(workload, length, count, seed=3)]
            latencies.append(Latencies(length, await parts.in_turn(chains, others)))
            for query, own in zip(asked, chains, strict=True):
                wrong += not await _right(store, workload.model, query, own.tobytes(), questions)
                if tree is not None:
                    scores = {replica: blocks for (replica, _), blocks in tree.find(own.tolist()).items()}
                    dynamo_wrong += scores != {replica: n for replica, n in enumerate(query.reach.tolist()) if n}
        load = await _saturate(redis_url, parts, workload, hashes, count, window_s)
    finally:
        parts.link.close()
        await store.close()
    return Lookups(latencies, load, wrong, dynamo_wrong, count * len(LENGTHS))


class _Parts(NamedTuple):
    """What a lookup is made of, and what it is compared with."""

    model: str
    store: RedisStore
    client: "aioredis.Redis"
    link: Link
    tree: Tree | None

    async def in_turn(
        self, chains: Sequence[NDArray[np.uint64]], others: Sequence[NDArray[np.uint64]]
    ) -> dict[str, list[float]]:
        """Return how long each part took, call by call; `others`: chains that no find has decoded yet."""
        link, tree = self.link, self.tree
        samples: dict[str, list[float]] = {part: [] for part in PARTS}
        key = f"{{{model_slug(self.model)}.0}}i"
        order = [part for part in PARTS if part != "decode" and (part != "dynamo" or tree is not None)]
        execute: Any = self.client.execute_command
        for own, other in zip(chains, others, strict=True):
            packed, listed = own.tobytes(), own.tolist()
            arguments = (1, key, *stretches(packed, 0, 0))
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "ping": lambda: link.call("PING"),
                "nothing": lambda: link.call("FCALL_RO", "kvatlas_bench_nothing", *arguments),  # noqa: B023  # called now
                "function": lambda: link.call("FCALL_RO", "kvatlas_find", *arguments),  # noqa: B023
                "redis_py": lambda: execute("FCALL_RO", "kvatlas_find", *arguments),  # noqa: B023
                "find": lambda: self.store.find(self.model, packed),  # noqa: B023
            }
            random.shuffle(order)
            for part in order:
                began_s = time.perf_counter()
                if part == "dynamo" and tree is not None:
                    tree.find(listed)
                else:
                    await calls[part]()
                samples[part].append(time.perf_counter() - began_s)
            packed = other.tobytes()
            reply = await link.call("FCALL_RO", "kvatlas_find", 1, key, *stretches(packed, 0, 0))
            began_s = time.perf_counter()
            runs_by_slot(list(pieces(reply, packed, 0)))
            samples["decode"].append(time.perf_counter() - began_s)
        return samples


async def _right(store: RedisStore, model: str, query: Query, packed: bytes, questions: Sequence[Question]) -> bool:
    """Return whether every replica's reach, by tier, is what the workload says."""
    # one token more than the blocks, for the last one is never reused
    prompt = Prompt(model, len(query.blocks) * UNIT + 1, hashes=packed, block_size=UNIT)
    found = await reaches(store, prompt, questions)
    for replica, (blocks, gpu) in enumerate(zip(query.reach.tolist(), query.gpu.tolist(), strict=True)):
        reach = found.get(holder(replica), NOTHING)
        expected = {"gpu": gpu * UNIT, "host": (blocks - gpu) * UNIT}
        if reach.tokens != blocks * UNIT or reach.by_tier != {tier: n for tier, n in expected.items() if n}:
            return False
    return True


async def _saturate(
    redis_url: str, parts: _Parts, workload: Workload, hashes: NDArray[np.uint64], count: int, window_s: float
) -> Load:
    """Keep both busy in turn; every window has prompts of its own."""
    server = redis_client.Redis.from_url(redis_url)
    ours: list[Use] = []
    theirs: list[Use] = []
    for window in range(_WINDOWS):
        chains = [chain(hashes, blocks) for blocks in prompts(workload, LENGTHS[-1], count, seed=10 + window)]
        if parts.tree is not None:
            theirs.append(_busy(parts.tree, [own.tolist() for own in chains], window_s))
        before_s = _cpu_s(server)
        use = await _keep_busy(parts, [own.tobytes() for own in chains], window_s)
        ours.append(use._replace(server_cpu_s=_cpu_s(server) - before_s))
    server.close()
    return Load(_sum(ours), _sum(theirs) if theirs else None)


def _busy(tree: Tree, chains: Sequence[list[int]], window_s: float) -> Use:
    began_s, cpu_s, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < began_s + window_s:
        tree.find(chains[done % len(chains)])
        done += 1
    return Use(done, time.perf_counter() - began_s, time.process_time() - cpu_s)


async def _keep_busy(parts: _Parts, chains: Sequence[bytes], window_s: float) -> Use:
    began_s, cpu_s, done = time.perf_counter(), time.process_time(), 0

    async def look() -> None:
        nonlocal done
        while time.perf_counter() < began_s + window_s:
            number, done = done, done + 1
            await parts.store.find(parts.model, chains[number % len(chains)])

    await asyncio.gather(*(look() for _ in range(_CONCURRENT)))
    return Use(done, time.perf_counter() - began_s, time.process_time() - cpu_s)


def _sum(uses: Sequence[Use]) -> Use:
    return Use(*map(sum, zip(*uses, strict=True)))


def _cpu_s(server: "redis_client.Redis") -> float:
    cpu: Any = server.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])
