"""One run of the benchmark: services, ingest, lookups, prices, report."""

import argparse
import gc
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import redis as redis_client

from ops.bench import ingest, lookup, prices
from ops.bench.dynamo import Indexer, Tree
from ops.bench.report import Report, say, say_load
from ops.bench.traffic import block_hashes, messages
from ops.bench.workload import Workload, build, queries
from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.redis import EmbeddedRedis

_STOP_S = 15.0
_PRICED_BLOCKS = 512  # 32,768 tokens
_PRICED = 200


async def run(arguments: argparse.Namespace, *, compare: bool) -> None:
    """Measure everything on services of its own and print it; `compare`: with Dynamo, which can be imported."""
    workload = build(arguments.blocks, arguments.replicas, arguments.event_blocks)
    async with AsyncExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-bench-")))
        kafka = await exit_stack.enter_async_context(EmbeddedKafka(folder / "kafka"))
        redis = await exit_stack.enter_async_context(EmbeddedRedis(folder / "redis", executable=arguments.redis_server))
        plan = Plan(arguments.merged, arguments.queries, arguments.window_s, compare)
        report = await measure(workload, plan, kafka.bootstrap, redis.url, folder)
    report.say_json()


class Plan(NamedTuple):
    """How much is measured."""

    merged: int  # engine events that a record says
    queries: int  # prompts of each length
    window_s: float  # of a turn under load
    compare: bool  # with Dynamo


async def measure(workload: Workload, plan: Plan, brokers: str, redis_url: str, folder: Path) -> Report:
    """Return all figures, and print them for people as they come.

    Args:
        brokers, redis_url: services that do not know the workload's model yet.
        folder: for logs.
    """
    say(
        f"{workload.blocks:,} blocks on {workload.replicas} replicas: {workload.held:,} (block, replica) pairs, "
        f"{len(workload.steps):,} engine events"
    )
    hashes = block_hashes(workload)
    records = list(messages(workload, plan.merged))
    say(
        f"{len(records):,} records of {plan.merged} events each, "
        f"{sum(len(record.value) for record in records) / len(records):,.0f} bytes on average"
    )
    gc.collect()
    gc.freeze()  # the workload is not this benchmark's to collect again and again
    with redis_client.Redis.from_url(redis_url) as server:
        say(_version(server))
        say_load()
        preloaded = await ingest.preload(brokers, workload.model, records)
        before_bytes = _used_bytes(server)
        tree = Tree() if plan.compare else None
        events = tree.encode([step for step in workload.steps if step.stored], hashes) if tree is not None else []
        log = folder / "worker.log"
        worker = ingest.start_part("worker", workload.model, brokers, redis_url, log)
        try:
            ingested = await ingest.watch(worker, log, redis_url, preloaded, tree, events)
        finally:
            await worker.stop(_STOP_S)
        if tree is not None:
            tree.apply(tree.encode([step for step in workload.steps if not step.stored], hashes))
        report = Report(
            ingested=ingested,
            bytes_per_holding=(_used_bytes(server) - before_bytes) / workload.held,
            dynamo_bytes_per_holding=tree.memory_bytes / workload.held if tree is not None else None,
            lookups=await lookup.measure(redis_url, workload, hashes, tree, plan.queries, plan.window_s),
        )
    report.say_lookups()
    asked = queries(workload, _PRICED_BLOCKS, min(_PRICED, plan.queries), seed=2)
    indexer = None
    try:
        if plan.compare:
            indexer = Indexer(workload.replicas, folder / "indexer.log")
            await indexer.ready()
            await indexer.feed(workload.steps, hashes, max(asked, key=lambda query: int(query.reach.max())))
        report.prices = await prices.measure(brokers, redis_url, workload, asked, indexer, folder, plan.window_s)
    finally:
        if indexer is not None:
            await indexer.stop()
    report.say_prices()
    say_load()
    return report


def _version(server: "redis_client.Redis") -> str:
    version: Any = server.info("server")
    return f"{version.get('server_name', 'redis')} {version.get('valkey_version', version['redis_version'])}"


def _used_bytes(server: "redis_client.Redis") -> int:
    memory: Any = server.info("memory")
    return int(memory["used_memory"])
