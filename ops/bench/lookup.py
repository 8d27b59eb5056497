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
from ops.bench.traffic import MODEL, UNIT, chain, holder
from ops.bench.workload import LENGTHS, Query, Workload, queries
from schemas.topics import model_slug

_CONCURRENT = 32
_WINDOW_S = 0.5
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

    def ratio(self, share: float = 0.5) -> float:
        """Return the same of our find as a multiple of Dynamo's."""
        return self.us("find", share) / self.us("dynamo", share)


class Load(NamedTuple):
    """2048-block lookups under load, of which 32 are always on their way."""

    per_s: float
    server_us: float  # CPU of the Redis process, a lookup
    client_us: float  # CPU of this one
    dynamo_per_s: float  # one thread calling
    dynamo_us: float  # CPU, its background thread included

    @property
    def ratio(self) -> float:
        """Lookups for a second of CPU, wherever it was spent, as a multiple of Dynamo's."""
        return self.dynamo_us / (self.server_us + self.client_us)

    @property
    def ratio_of_server(self) -> float:
        """The same for the CPU of Redis alone, which all routers share."""
        return self.dynamo_us / self.server_us


class Lookups(NamedTuple):
    """All that was measured."""

    latencies: list[Latencies]
    load: Load
    wrong: int
    checked: int


async def measure(redis_url: str, workload: Workload, hashes: NDArray[np.uint64], tree: Tree, count: int) -> Lookups:
    """Return what lookups cost; each prompt is asked once with each way, in random order."""
    client = aioredis.Redis.from_url(redis_url)
    store = RedisStore([client])
    link = Link(client)
    await link.call("FUNCTION", "LOAD", "REPLACE", _NOTHING)
    questions = [ask(row.holder, row.profile) for row in await store.holders(MODEL) if row.profile is not None]
    latencies: list[Latencies] = []
    wrong = 0
    try:
        for length in LENGTHS:
            asked = queries(workload, length, count, seed=1)
            chains = [chain(hashes, query.blocks) for query in asked]
            others = [chain(hashes, query.blocks) for query in queries(workload, length, count, seed=3)]
            latencies.append(Latencies(length, await _interleave(chains, others, store, client, link, tree)))
            for query, own in zip(asked, chains, strict=True):
                wrong += not await _right(store, query, own.tobytes(), questions)
        load = await _saturate(redis_url, store, tree, chains)
    finally:
        link.close()
        await store.close()
    return Lookups(latencies, load, wrong, count * len(LENGTHS))


async def _interleave(
    chains: Sequence[NDArray[np.uint64]],
    others: Sequence[NDArray[np.uint64]],
    store: RedisStore,
    client: "aioredis.Redis",
    link: Link,
    tree: Tree,
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    key = f"{{{model_slug(MODEL)}.0}}i"
    order = [part for part in PARTS if part != "decode"]
    execute: Any = client.execute_command
    for own, other in zip(chains, others, strict=True):
        packed, listed = own.tobytes(), own.tolist()
        arguments = (1, key, *stretches(packed, 0, 0))
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "ping": lambda: link.call("PING"),
            "nothing": lambda: link.call("FCALL_RO", "kvatlas_bench_nothing", *arguments),  # noqa: B023  # called now
            "function": lambda: link.call("FCALL_RO", "kvatlas_find", *arguments),  # noqa: B023
            "redis_py": lambda: execute("FCALL_RO", "kvatlas_find", *arguments),  # noqa: B023
            "find": lambda: store.find(MODEL, packed),  # noqa: B023
        }
        random.shuffle(order)
        for part in order:
            began_s = time.perf_counter()
            if part == "dynamo":
                tree.find(listed)
            else:
                await calls[part]()
            samples[part].append(time.perf_counter() - began_s)
        # of a prompt that no find has decoded yet
        packed = other.tobytes()
        reply = await link.call("FCALL_RO", "kvatlas_find", 1, key, *stretches(packed, 0, 0))
        began_s = time.perf_counter()
        runs_by_slot(list(pieces(reply, packed, 0)))
        samples["decode"].append(time.perf_counter() - began_s)
    return samples


async def _right(store: RedisStore, query: Query, packed: bytes, questions: Sequence[Question]) -> bool:
    """Return whether every replica's reach, by tier, is what the workload says."""
    # one token more than the blocks, for the last one is never reused
    prompt = Prompt(MODEL, len(query.blocks) * UNIT + 1, hashes=packed, block_size=UNIT)
    found = await reaches(store, prompt, questions)
    for replica, (blocks, gpu) in enumerate(zip(query.reach.tolist(), query.gpu.tolist(), strict=True)):
        reach = found.get(holder(replica), NOTHING)
        expected = {"gpu": gpu * UNIT, "host": (blocks - gpu) * UNIT}
        if reach.tokens != blocks * UNIT or reach.by_tier != {tier: n for tier, n in expected.items() if n}:
            return False
    return True


async def _saturate(redis_url: str, store: RedisStore, tree: Tree, chains: Sequence[NDArray[np.uint64]]) -> Load:
    packed = [own.tobytes() for own in chains]
    listed = [own.tolist() for own in chains]
    server = redis_client.Redis.from_url(redis_url)
    ours = theirs = 0
    ours_s = theirs_s = server_s = client_s = dynamo_s = 0.0

    async def look(first: int, end_s: float) -> int:
        done = 0
        while time.perf_counter() < end_s:
            await store.find(MODEL, packed[(first + done) % len(packed)])
            done += 1
        return done

    for window in range(_WINDOWS):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        number = window * 1000
        while time.perf_counter() < began_s + _WINDOW_S:
            tree.find(listed[number % len(listed)])
            number += 1
        theirs += number - window * 1000
        theirs_s += time.perf_counter() - began_s
        dynamo_s += time.process_time() - cpu_s
        before_s = _cpu_s(server)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        ends_s = began_s + _WINDOW_S
        ours += sum(await asyncio.gather(*(look(97 * task + window, ends_s) for task in range(_CONCURRENT))))
        ours_s += time.perf_counter() - began_s
        client_s += time.process_time() - cpu_s
        server_s += _cpu_s(server) - before_s
    return Load(ours / ours_s, server_s / ours * 1e6, client_s / ours * 1e6, theirs / theirs_s, dynamo_s / theirs * 1e6)


def _cpu_s(server: "redis_client.Redis") -> float:
    cpu: Any = server.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])
