"""Worker processes between a real Kafka and a real Redis: whatever dies or goes away, nothing is silently lost."""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as aioredis
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from index.liveness import judge
from index.redis_store import RedisStore
from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports
from ops.embedded.redis import EmbeddedRedis
from ops.settings import PREFIX
from ops.stack import RouterClient, Stack
from schemas.events import Heartbeat, decode_record, encode_record
from schemas.profiles import Holder
from schemas.topics import DEAD_LETTERS, REPLICAS, events_topic, topic_specs
from streams.topics import create_topics
from tests.support.bench import DEADLINE_S, Bench, StoreIndex
from tests.support.payloads import batch, pack
from tests.support.records import record, run
from tests.support.waiting import until

PARTITIONS = 2
OPTIONS = {"WORKER_SESSION_TIMEOUT_S": "2", "PARTITIONS": str(PARTITIONS)}

# A worker whose store fails as no store should, once it has applied that many flushes.
_FAILING = """
import sys
from index.redis_store import RedisStore
from ops.cli import main

left = int(sys.argv.pop())
apply = RedisStore.apply

async def fail(self, flush):
    global left
    left -= bool(flush.writes)
    if left < 0:
        raise RuntimeError("a bug")
    return await apply(self, flush)

RedisStore.apply = fail
main()
"""


@pytest.fixture(scope="module")
def broker(embedded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """A broker that misses a dead worker soon."""
    service = EmbeddedKafka(tmp_path_factory.mktemp("kafka"))
    service.properties["group.min.session.timeout.ms"] = "1000"
    asyncio.run(service.start())
    yield service
    asyncio.run(service.stop())


@pytest.fixture
def server(embedded: None, tmp_path: Path, redis_server: Path | None) -> Iterator[EmbeddedRedis]:
    """A Redis that the test may stop; it keeps its data."""
    service = EmbeddedRedis(tmp_path / "redis", executable=redis_server, keep_data=True)
    asyncio.run(service.start())
    yield service
    asyncio.run(service.stop())


class Pipeline:
    """A bench, and where worker processes fold what its relay says."""

    def __init__(self, bench: Bench, stack: Stack, store: RedisStore, topic: str) -> None:
        self.bench = bench
        self.stack = stack
        self.store = store
        self.topic = topic

    def start_worker(self, name: str = "worker") -> ChildProcess:
        """Start a worker."""
        return self.stack.start_worker(name)

    async def kill_worker(self, name: str = "worker") -> None:
        """Kill it without a warning."""
        await self.stack.stop_part(name, hard=True)

    def logged(self, event: str, name: str = "worker") -> list[dict[str, Any]]:
        """Return what a part logged under that name."""
        lines = self.stack.log_of(name).read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if entry.get("event") == event]

    async def until_logged(self, event: str, name: str = "worker", count: int = 1) -> None:
        """Wait until a part has logged that."""
        await until(lambda: len(self.logged(event, name)) >= count, DEADLINE_S)

    async def end(self) -> dict[int, int]:
        """Return partition -> next offset of the topic."""
        consumer = AIOKafkaConsumer(bootstrap_servers=self.bench.brokers)
        await consumer.start()
        try:
            ends = await consumer.end_offsets([TopicPartition(self.topic, n) for n in range(PARTITIONS)])
        finally:
            await consumer.stop()
        return {tp.partition: offset for tp, offset in ends.items()}

    async def cursors(self) -> dict[int, int]:
        """Return partition -> next offset that a worker reads."""
        return {partition: offset for (_, partition), offset in (await self.store.cursors(self.bench.model)).items()}


@asynccontextmanager
async def piped(
    broker: EmbeddedKafka,
    redis_url: str,
    model: str,
    folder: Path,
    *,
    topics: bool = True,
    options: Mapping[str, str] | None = None,
    **engine: Any,
) -> AsyncIterator[Pipeline]:
    """Topics, a bench and a stack without workers yet; what is started is stopped at the end."""
    if topics:
        await create_topics(broker.bootstrap, topic_specs([model], PARTITIONS))
    stack = Stack(
        [model],
        brokers=broker.bootstrap,
        redis_url=redis_url,
        folder=folder,
        options={**OPTIONS, "WORKER_GROUP": f"group-{model}", **(options or {})},
    )
    store = RedisStore.from_urls([redis_url])
    async with AsyncExitStack() as exits:
        exits.push_async_callback(store.close)
        exits.push_async_callback(stack._stop_parts)
        bench = await exits.enter_async_context(Bench(broker.bootstrap, model, StoreIndex(store, model), **engine))
        yield Pipeline(bench, stack, store, events_topic(model))


# ---- workers that die


@pytest.mark.slow
async def test_killed_workers_lose_nothing(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """Two workers, records that flow, and `kill -9` of one or both at random moments: the index is equal each time."""
    rng = random.Random(unique_name)
    async with piped(broker, redis_url, unique_name, tmp_path, ranks=2) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        pipeline.start_worker("worker-0")
        pipeline.start_worker("worker-1")
        for victims in ([0], [0, 1]):
            publishing = asyncio.gather(*(_flow(bench, rank) for rank in (0, 1)))
            await asyncio.wait({publishing}, timeout=rng.uniform(0.0, 1.5))
            for victim in victims:
                await pipeline.kill_worker(f"worker-{victim}")
                pipeline.start_worker(f"worker-{victim}")
            await publishing
            await bench.settle()
        for rank in (0, 1):
            assert not (await bench.row(rank)).broken


@pytest.mark.slow
async def test_a_failing_agent_loses_nothing(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """A bug in the fold ends the process, in mid-flow; what it held is read again by the next one."""
    async with piped(broker, redis_url, unique_name, tmp_path) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        settings = {"KAFKA_BROKERS": bench.brokers, "REDIS_URL": redis_url, "MODELS": bench.model, **OPTIONS}
        environment = [f"{PREFIX}{name}={value}" for name, value in settings.items()]
        command = ["env", *environment, sys.executable, "-c", _FAILING, "worker", "3"]
        failing = ChildProcess(command, tmp_path / "failing.log")
        try:
            publishing = asyncio.create_task(_flow(bench))
            assert await failing.exited(DEADLINE_S) == os.EX_SOFTWARE
            await publishing
        finally:
            failing.kill()
        pipeline.start_worker()
        await bench.settle()


@pytest.mark.slow
async def test_sigterm_in_mid_batch_loses_nothing(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """A Redis that is slow is waited for, one that is gone is not for long; the exit code is 0 either way.

    The cursors then say what is applied, and the next worker goes on there.
    """
    async with piped(broker, server.url, unique_name, tmp_path) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        worker = pipeline.start_worker()
        await bench.publish(20)
        await bench.settle()
        async with aioredis.Redis.from_url(server.url) as client:
            await client.client_pause(1500, all=False)
            await bench.publish(50)
            await pipeline.stack.stop_part("worker")
        assert worker.exit_code == 0
        assert pipeline.logged("stream.worker_stopped")
        before = await pipeline.cursors()
        worker = pipeline.start_worker()
        await bench.settle()
        again = pipeline.logged("stream.partitions_assigned")[-1]["partitions"]
        assert {int(tp.rsplit("/", 1)[1]): cursor for tp, cursor in again.items() if cursor != "first"} == before
        await server.stop()
        await bench.publish(20)
        await pipeline.until_logged("stream.store_unavailable")
        await pipeline.stack.stop_part("worker")
        assert worker.exit_code == 0
        await server.start()
        pipeline.start_worker()
        await bench.settle()


async def test_a_worker_that_kafka_refuses_says_so_and_ends(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """A session shorter than the broker allows: exit code 2, where Faust would wait for partitions without end."""
    options = {"WORKER_SESSION_TIMEOUT_S": "0.5"}
    async with piped(broker, redis_url, unique_name, tmp_path, options=options) as pipeline:
        worker = pipeline.start_worker()
        assert await worker.exited(DEADLINE_S) == 2
        assert "InvalidSessionTimeout" in pipeline.logged("stream.group_refused")[-1]["error"]


# ---- services away


@pytest.mark.slow
async def test_kafka_away_for_a_while_costs_nothing_but_time(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """Killed and started again: worker and relay go on in their own processes and lives, and the index is equal."""
    async with piped(broker, redis_url, unique_name, tmp_path) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        worker = pipeline.start_worker()
        await bench.publish(20)
        await bench.settle()
        life = (await bench.row()).life
        await broker.stop(hard=True)
        await bench.publish(200)
        await broker.start()
        await bench.publish(20)
        await bench.settle()
        assert (await bench.row()).life == life
        assert worker.exit_code is None
        assert len(pipeline.logged("stream.worker_started")) == 1


async def test_redis_away_for_a_while_costs_nothing_but_time(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """The worker waits with what it has, in place; afterwards the index is equal, in the same life."""
    async with piped(broker, server.url, unique_name, tmp_path) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        worker = pipeline.start_worker()
        await bench.publish(20)
        await bench.settle()
        life = (await bench.row()).life
        await server.stop(hard=True)
        await bench.publish(100)
        await pipeline.until_logged("stream.store_unavailable", count=3)
        await server.start()
        await bench.publish(10)
        await bench.settle()
        assert (await bench.row()).life == life
        assert worker.exit_code is None
        assert not pipeline.logged("stream.index_lost")


@pytest.mark.slow
async def test_a_worker_that_is_stuck_begins_again(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """Records wait and none is folded, whatever the reason: the same process starts anew, and nothing is lost."""
    options = {"WORKER_STUCK_AFTER_S": "5"}
    async with piped(broker, server.url, unique_name, tmp_path, options=options) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        worker = pipeline.start_worker()
        await bench.publish(20)
        await bench.settle()
        await server.stop(hard=True)
        await bench.publish(20)
        await pipeline.until_logged("stream.worker_stuck")
        await server.start()
        await bench.settle()
        assert worker.exit_code is None
        assert len(pipeline.logged("stream.worker_started")) == 2


@pytest.mark.slow
async def test_a_flushed_redis_is_rebuilt(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """FLUSHALL while running: the router says unknown of what it knew, the worker begins again, the index is equal."""
    async with AsyncExitStack() as exits:
        pipeline = await exits.enter_async_context(piped(broker, server.url, unique_name, tmp_path))
        bench = pipeline.bench
        await exits.enter_async_context(bench.relaying())
        worker = pipeline.start_worker()
        await pipeline.until_logged("stream.worker_started")
        await pipeline.stack.start_router()
        router = await exits.enter_async_context(RouterClient(pipeline.stack.router_url))
        await bench.publish(50)
        await bench.settle()
        await _until_states(router, bench.model, {"r": "live"})
        async with aioredis.Redis.from_url(server.url) as client:
            await client.flushall()
        answers: list[dict[str, str]] = []
        asking = asyncio.create_task(_keep_asking(router, bench.model, answers))
        await pipeline.until_logged("stream.index_lost")
        await bench.publish(20)
        await bench.settle()
        assert worker.exit_code is None
        await _until_states(router, bench.model, {"r": "live"})
        asking.cancel()
        assert all(states.keys() == {"r"} for states in answers)
        told = [states["r"] for states in answers]
        doubted = [number for number, state in enumerate(told) if state == "unknown"]
        assert set(told[doubted[0] : doubted[-1]]) == {"unknown"}


@pytest.mark.slow
async def test_a_flushed_index_expects_who_is_registered(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """Whose records are all gone, and whose relay does not speak: a router that starts then names it all the same."""
    async with piped(broker, server.url, unique_name, tmp_path, ranks=2) as pipeline:
        bench = pipeline.bench
        pipeline.start_worker()
        async with bench.relaying():
            await bench.publish(20)
            await bench.settle()
        await _delete_all(pipeline)
        async with aioredis.Redis.from_url(server.url) as client:
            await client.flushall()
        await pipeline.until_logged("stream.index_empty", count=2)
        (port,) = free_ports(1)
        router = pipeline.stack.start("router", ["router"], {"ROUTER_PORT": str(port)})
        async with RouterClient(f"http://{LOOPBACK}:{port}") as asking:

            async def expected() -> bool:
                try:
                    answer = await asking.price({"model": bench.model, "token_ids": list(range(64))})
                except httpx.TransportError:
                    assert router.exit_code is None
                    return False
                told = {(r["replica"], r["rank"], r["state"], *r["reasons"]) for r in answer["replicas"]}
                return told == {("r", rank, "unknown", "rebuilding") for rank in (0, 1)}

            await until(expected, DEADLINE_S)
            ready = await asking.http.get("/readyz")
        assert (ready.status_code, ready.json()["models"]) == (503, {bench.model: "rebuilding"})


async def test_who_spoke_long_ago_is_not_live_when_it_is_read(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """A worker begins with an hour's log; at its end only those are live whose heartbeats are from now."""
    async with piped(broker, redis_url, unique_name, tmp_path) as pipeline:
        alive = Heartbeat("live", {"0": 1})
        now_ms = time.time_ns() // 1_000_000
        past = [record(run([1, 2])), record(alive)]
        other = Holder("r", 1)
        present = [record(run([1]), holder=other), *(record(alive, holder=other) for _ in range(500))]
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        await producer.start()
        try:
            for said, at_ms in [*((said, now_ms - 3_600_000) for said in past), *((said, now_ms) for said in present)]:
                await producer.send(pipeline.topic, encode_record(said), partition=0, timestamp_ms=at_ms)
        finally:
            await producer.stop()
        pipeline.start_worker()
        await _until_judged(pipeline.bench, "live", rank=1)
        await _until_judged(pipeline.bench, "unknown", "rebuilding")
        assert (await pipeline.bench.row()).sequence == 1


# ---- logs that are not as the cursors say


@pytest.mark.slow
async def test_records_deleted_unread_are_told_again(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """A cursor below the log's start: the holder is unknown until its relay has told everything again.

    That it lost records shows in the next ones; where its engine then says nothing, and in a Redis that lost
    everything too, nothing would show, and the relay is asked all the same.
    """
    async with piped(broker, server.url, unique_name, tmp_path) as pipeline:
        bench = pipeline.bench
        async with bench.relaying():
            pipeline.start_worker()
            await bench.publish(20)
            await bench.settle()
            await pipeline.stack.stop_part("worker")
            await bench.publish(20)
            await _until_said(pipeline)
            await _delete_all(pipeline)
            await bench.publish(20)
            await _until_said(pipeline)
        life = (await bench.row()).life
        pipeline.start_worker()
        await pipeline.until_logged("stream.records_unread")
        await _until_judged(bench, "unknown", "records_lost")
        await pipeline.until_logged("stream.resync_asked")
        async with bench.relaying():
            await bench.settle(above_life=life)
            await _until_judged(bench, "live")
            for flushed, messages in ((False, 70), (True, 90)):
                await pipeline.stack.stop_part("worker")
                await bench.restart_engine()
                await bench.publish(messages)
                await _until_said(pipeline)
                await _delete_all(pipeline)
                async with aioredis.Redis.from_url(server.url) as client:
                    life = (await bench.row()).life
                    await (client.flushall() if flushed else client.ping())
                pipeline.start_worker()
                await bench.settle(above_life=life)


async def test_a_profile_that_is_in_no_log_any_more_is_told_again(
    broker: EmbeddedKafka, server: EmbeddedRedis, unique_name: str, tmp_path: Path
) -> None:
    """A clear makes what follows it whole, but not the profile that its life's first record told."""
    async with piped(broker, server.url, unique_name, tmp_path, replica=unique_name) as pipeline:
        bench = pipeline.bench
        async with bench.relaying():
            await bench.publish(20)
            await _until_said(pipeline)
            await _delete_all(pipeline)
            await _forget_entry(bench)
            cleared = pack(batch({"type": "AllBlocksCleared"}))
            bench.truths[0].take(await bench.engines[0].publish(cleared), cleared)
            await bench.publish(20)
            pipeline.start_worker()
            await bench.settle()
            life = (await bench.row()).life
            assert (await bench.row()).profile is None
            await bench.settle(above_life=life)
            assert (await bench.row()).profile is not None


@pytest.mark.slow
async def test_a_topic_made_anew_is_told_again(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """Its offsets mean nothing then: under a running worker nothing is dropped, and what nobody read is asked for."""
    async with piped(broker, redis_url, unique_name, tmp_path) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        pipeline.start_worker()
        await bench.publish(50)
        await bench.settle()
        life = (await bench.row()).life
        await _make_anew(pipeline)
        await bench.publish(20)
        await bench.settle()
        assert (await bench.row()).life == life
        await pipeline.stack.stop_part("worker")
        await bench.publish(20)
        await _until_said(pipeline)
        await _make_anew(pipeline)
        pipeline.start_worker()
        await bench.publish(20)
        await bench.settle(above_life=life)


async def test_a_missing_topic_is_said_and_waited_for(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """The worker neither fails nor makes it, and can be stopped meanwhile; once it exists all works."""
    async with piped(broker, redis_url, unique_name, tmp_path, topics=False) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        worker = pipeline.start_worker()
        await pipeline.until_logged("stream.topic_missing")
        await pipeline.stack.stop_part("worker")
        assert worker.exit_code == 0
        pipeline.start_worker()
        await pipeline.until_logged("stream.topic_missing", count=2)
        assert pipeline.topic in pipeline.logged("stream.topic_missing")[-1]["topics"]
        await bench.publish(10)
        await create_topics(broker.bootstrap, topic_specs([bench.model], PARTITIONS))
        await bench.settle()


# ---- records that cannot be read


async def test_what_cannot_be_read_is_set_aside(
    broker: EmbeddedKafka, redis_url: str, unique_name: str, tmp_path: Path
) -> None:
    """With its bytes, its place and the reason, be it as large as Kafka takes; the rest is unaffected."""
    async with piped(broker, redis_url, unique_name, tmp_path) as pipeline, pipeline.bench.relaying():
        bench = pipeline.bench
        pipeline.start_worker()
        garbage = [b"", b"\xc1", b"not msgpack", random.Random(3).randbytes(1_048_400)]
        sent: dict[tuple[int, int], bytes] = {}
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, max_request_size=1_048_588)
        await producer.start()
        try:
            for value in garbage:
                await bench.publish(10)
                for partition in range(PARTITIONS):
                    place = await producer.send_and_wait(pipeline.topic, value, partition=partition)
                    sent[place.partition, place.offset] = value
        finally:
            await producer.stop()
        await bench.settle()
        letters: list[Any] = []

        async def all_set_aside() -> bool:
            letters[:] = await _dead_letters(pipeline)
            return len(letters) >= len(sent)

        await until(all_set_aside, DEADLINE_S)
        found = {(int(headers["partition"]), int(headers["offset"])): value for value, headers in letters}
        assert found == sent
        assert {headers["reason"] for _, headers in letters} == {b"record_malformed"}


# ---- helpers


async def _flow(bench: Bench, rank: int = 0, seconds: float = 2.0) -> None:
    """Publish without a pause for that long."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        await bench.publish(1, rank=rank)


async def _states(router: RouterClient, model: str) -> dict[str, str]:
    answer = await router.price({"model": model, "token_ids": list(range(64))})
    return {price["replica"]: price["state"] for price in answer["replicas"]}


async def _keep_asking(router: RouterClient, model: str, answers: list[dict[str, str]]) -> None:
    """Ask what state each replica is in, until cancelled."""
    while True:
        answers.append(await _states(router, model))
        await asyncio.sleep(0.01)


async def _until_states(router: RouterClient, model: str, states: dict[str, str]) -> None:
    async def answered() -> bool:
        return await _states(router, model) == states

    await until(answered, DEADLINE_S)


async def _until_said(pipeline: Pipeline) -> None:
    """Wait until the relay has told Kafka all that the engine said: heartbeats alone follow."""
    last = pipeline.bench.engines[0].next - 1
    consumer = AIOKafkaConsumer(
        bootstrap_servers=pipeline.bench.brokers, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    consumer.assign([TopicPartition(pipeline.topic, n) for n in range(PARTITIONS)])
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for message in consumer:
                if decode_record(message.value).engine_sequence.get("0") == last:
                    return
    finally:
        await consumer.stop()


async def _make_anew(pipeline: Pipeline) -> None:
    """Delete the topic and create another of its name."""
    admin = AIOKafkaAdminClient(bootstrap_servers=pipeline.bench.brokers)
    await admin.start()
    try:
        await admin.delete_topics([pipeline.topic])
    finally:
        await admin.close()
    await create_topics(pipeline.bench.brokers, topic_specs([pipeline.bench.model], PARTITIONS))


async def _forget_entry(bench: Bench) -> None:
    """Delete the replica's entry in the registry."""
    producer = AIOKafkaProducer(bootstrap_servers=bench.brokers)
    await producer.start()
    try:
        await producer.send_and_wait(REPLICAS, None, key=bench.replica.encode())
    finally:
        await producer.stop()


async def _delete_all(pipeline: Pipeline) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=pipeline.bench.brokers)
    await admin.start()
    try:
        ends = await pipeline.end()
        await admin.delete_records(
            {TopicPartition(pipeline.topic, partition): RecordsToDelete(end) for partition, end in ends.items()}
        )
    finally:
        await admin.close()


async def _until_judged(bench: Bench, state: str, *reasons: str, rank: int = 0) -> None:
    async def judged() -> bool:
        row = await bench.index.row(bench.replica, rank)
        return row is not None and judge(row, stale_after_s=5.0, unknown_after_s=30.0) == (state, reasons)

    await until(judged, DEADLINE_S)


async def _dead_letters(pipeline: Pipeline) -> list[tuple[bytes, dict[str, bytes]]]:
    partition = TopicPartition(DEAD_LETTERS, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=pipeline.bench.brokers, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    try:
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        letters: list[tuple[bytes, dict[str, bytes]]] = []
        while await consumer.position(partition) < end:
            for record in (await consumer.getmany(timeout_ms=1000)).get(partition, []):
                headers = dict(record.headers)
                if headers["topic"] == pipeline.topic.encode():
                    letters.append((record.value, headers))
        return letters
    finally:
        await consumer.stop()
