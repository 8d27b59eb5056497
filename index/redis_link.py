"""A lean connection to a Redis server: calls go out at once, in order, and many may be on their way.

redis-py's asyncio client spends several times a short call's round trip in Python (`make bench`, table of parts). It
still opens the connection, so that URLs, passwords and TLS mean what they mean everywhere else.
"""

import asyncio
from collections import deque
from typing import Any

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

_INCOMPLETE = object()


class Link:
    """Calls one server over one connection, which the first call opens, and the first one after it broke."""

    def __init__(self, client: "aioredis.Redis") -> None:
        self._client = client
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None
        self._replaced = 0

    @property
    def losses(self) -> int:
        """How many connections broke: a server that answers after one may not know all that one before it was told."""
        return self._replaced + (self._connection is not None and self._connection.broken)

    async def call(self, *command: bytes | str | int) -> Any:
        """Return the reply of one command, as the server sent it.

        Raises:
            ResponseError: the server refused the command.
            ConnectionError, TimeoutError: redis-py's; whether the command was carried out is not known.
        """
        connection = self._connection
        if connection is None or connection.broken:
            connection = await self._open()
        return await connection.call(command)

    def close(self) -> None:
        """Close the connection; calls on their way fail."""
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.break_off(RedisConnectionError("closed by this process"))

    async def _open(self) -> "_Connection":
        """Open a connection, one for all who wait for it."""
        opening = self._opening
        if opening is None:
            opening = self._opening = asyncio.create_task(_connect(self._client))
            opening.add_done_callback(self._opened)
        return await asyncio.shield(opening)

    def _opened(self, opening: "asyncio.Task[_Connection]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._replaced += self._connection is not None
            self._connection = opening.result()


async def _connect(client: "aioredis.Redis") -> "_Connection":
    pool: Any = client.connection_pool
    shell = pool.make_connection()
    shell.retry = Retry(NoBackoff(), 0)  # the caller decides how often
    await shell.connect()
    # after the handshake redis-py's reader is empty, and the socket is ours
    writer, shell._writer, shell._reader = shell._writer, None, None
    return _Connection(writer, pool.connection_kwargs.get("socket_timeout"))


class _Connection(asyncio.Protocol):
    """An open connection; it breaks once and stays so."""

    def __init__(self, writer: asyncio.StreamWriter, timeout_s: float | None) -> None:
        self.broken = False
        self._writer = writer  # it would close the transport when collected
        self._transport = writer.transport
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(replyError=ResponseError, notEnoughData=_INCOMPLETE)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # replies come in this order
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._transport.set_protocol(self)

    def call(self, command: tuple[bytes | str | int, ...]) -> "asyncio.Future[Any]":
        """Send a command; return its reply to be."""
        if self.broken:
            raise RedisConnectionError("connection lost")
        loop = self._loop
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((reply, loop.time()))
        if self._watch is None and self._timeout_s is not None:
            self._watch = loop.call_later(self._timeout_s, self._look)
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub asks for one
        return reply

    def data_received(self, data: bytes) -> None:
        """Hand replies to those who wait for them."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if isinstance(reply, hiredis.PushNotification):
                    continue
                waiting, _ = self._waiting.popleft()
                if waiting.done():  # its caller was cancelled
                    continue
                if isinstance(reply, ResponseError):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self.break_off(RedisConnectionError(f"not a reply: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what was on its way."""
        self.break_off(RedisConnectionError(f"connection lost: {error or 'closed by the server'}"))

    def break_off(self, error: Exception) -> None:
        """Close the connection; all who wait hear why."""
        if self.broken:
            return
        self.broken = True
        self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        for waiting, _ in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()

    def _look(self) -> None:
        """Break off where the oldest call has waited too long."""
        self._watch = None
        if not self._waiting or self._timeout_s is None:
            return
        left_s = self._waiting[0][1] + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self.break_off(RedisTimeoutError(f"no reply within {self._timeout_s} s"))
