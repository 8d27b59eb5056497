"""The lean connection: order, refusals, a server that is slow, goes away and comes back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from index.redis_link import Link
from ops.embedded.redis import EmbeddedRedis
from tests.support.waiting import until


@pytest.fixture
async def server(embedded: None, tmp_path: Path, redis_server: Path | None) -> AsyncIterator[EmbeddedRedis]:
    """A server of the test's own."""
    async with EmbeddedRedis(tmp_path, executable=redis_server) as running:
        yield running


@pytest.fixture
async def link(server: EmbeddedRedis) -> AsyncIterator[Link]:
    """A link to it that waits half a second."""
    client = aioredis.Redis.from_url(server.url, socket_timeout=0.5)
    opened = Link(client)
    yield opened
    opened.close()
    await client.aclose()


async def test_many_calls_may_be_on_their_way(link: Link) -> None:
    """Each caller gets its own reply, in one connection; a refusal is its caller's alone."""
    calls = [link.call("ECHO", str(number)) for number in range(200)]
    replies = await asyncio.gather(*calls, link.call("NONSENSE"), return_exceptions=True)
    assert replies[:200] == [b"%d" % number for number in range(200)]
    assert isinstance(replies[200], ResponseError)
    assert (await link.call("CLIENT", "LIST")).count(b"\n") == 1


async def test_a_cancelled_call_leaves_its_reply_to_nobody(link: Link) -> None:
    """The next caller gets its own."""
    await link.call("PING")
    given_up = asyncio.create_task(link.call("ECHO", "a"))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await link.call("ECHO", "b") == b"b"


async def test_a_server_that_does_not_answer_in_time_is_left(server: EmbeddedRedis, link: Link) -> None:
    """All who wait are told, and once it answers again a new connection is opened."""
    await link.call("PING")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        replies = await asyncio.gather(*(link.call("PING") for _ in range(3)), return_exceptions=True)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert [type(reply) for reply in replies] == [RedisTimeoutError] * 3
    assert await link.call("PING") == b"PONG"


async def test_a_server_that_goes_away_and_comes_back(server: EmbeddedRedis, link: Link) -> None:
    """Calls on their way fail, later ones cannot connect, and then all is well again."""
    await link.call("SET", "key", "value")
    await server.stop(hard=True)

    async def refused() -> bool:
        try:
            await link.call("PING")
        except RedisConnectionError:
            return True
        return False

    assert await refused()
    await server.start()
    await until(lambda: server.pid is not None, 5.0)
    assert await link.call("GET", "key") is None
