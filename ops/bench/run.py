"""One run of the benchmark: services, ingest, lookups, prices, report."""

import argparse
import gc
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis as redis_client

from ops.bench import ingest, lookup, prices
from ops.bench.dynamo import Indexer, Tree
from ops.bench.report import Report, say, say_load
from ops.bench.traffic import block_hashes, messages
from ops.bench.workload import build, queries
from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.redis import EmbeddedRedis

_STOP_S = 15.0
_PRICED_BLOCKS = 512  # 32,768 tokens
_PRICED = 200


async def run(arguments: argparse.Namespace) -> None:
    """Measure everything and print it."""
    workload = build(arguments.blocks, arguments.replicas, arguments.event_blocks)
    say(
        f"{workload.blocks:,} blocks on {workload.replicas} replicas: {workload.held:,} (block, replica) pairs, "
        f"{len(workload.steps):,} engine events of at most {arguments.event_blocks} blocks"
    )
    hashes = block_hashes(workload)
    records = list(messages(workload, arguments.merged))
    say(
        f"{len(records):,} records of {arguments.merged} events each, "
        f"{sum(len(record.value) for record in records) / len(records):,.0f} bytes on average"
    )
    gc.collect()
    gc.freeze()  # the workload is not this benchmark's to collect again and again
    async with AsyncExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-bench-")))
        kafka = await exit_stack.enter_async_context(EmbeddedKafka(folder / "kafka"))
        redis = await exit_stack.enter_async_context(EmbeddedRedis(folder / "redis", executable=arguments.redis_server))
        server: Any = redis_client.Redis.from_url(redis.url)
        version = server.info("server")
        say(f"{version.get('server_name', 'redis')} {version.get('valkey_version', version['redis_version'])}")
        say_load()
        preloaded = await ingest.preload(kafka.bootstrap, records)
        empty_bytes = server.info("memory")["used_memory"]
        tree = Tree()
        events = tree.encode([step for step in workload.steps if step.stored], hashes)
        log = folder / "worker.log"
        worker = ingest.start_part("worker", kafka.bootstrap, redis.url, log)
        try:
            ingested = await ingest.watch(worker, log, redis.url, preloaded, tree, events)
        finally:
            await worker.stop(_STOP_S)
        tree.apply(tree.encode([step for step in workload.steps if not step.stored], hashes))
        report = Report(
            ingested=ingested,
            bytes_per_holding=(server.info("memory")["used_memory"] - empty_bytes) / workload.held,
            dynamo_bytes_per_holding=tree.memory_bytes / workload.held,
            lookups=await lookup.measure(redis.url, workload, hashes, tree, arguments.queries),
        )
        report.say_lookups()
        indexer = None
        try:
            asked = queries(workload, _PRICED_BLOCKS, _PRICED, seed=2)
            if not arguments.no_indexer:
                indexer = Indexer(workload.replicas, folder / "indexer.log")
                await indexer.ready()
                await indexer.feed(workload.steps, hashes, max(asked, key=lambda query: int(query.reach.max())))
            report.prices = await prices.measure(kafka.bootstrap, redis.url, workload, asked, indexer, folder)
        finally:
            if indexer is not None:
                await indexer.stop()
    report.say_prices()
    say_load()
    report.say_json()
