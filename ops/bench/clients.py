"""A lean HTTP client, so that the servers and not the client are measured; and percentiles."""

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Self

from ops.embedded.processes import LOOPBACK


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which that share of them lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def post(path: str, body: bytes) -> bytes:
    """Return a POST request of a JSON body as it goes over a connection that stays open."""
    head = f"POST {path} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def __aenter__(self) -> Self:
        """Connect."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, LOOPBACK, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        assert self._transport is not None  # entered
        self._transport.close()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the answer's status and body."""
        assert self._transport is not None  # entered
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        """Gather the answer; its length is in its head."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = bytes(self._buffer[:end]).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        self._answer.set_result((int(head.split(b" ", 2)[1]), body))

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the request that is on its way."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the server closed the connection"))


async def saturate(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> float:
    """Return the answers a second that these connections get, each asking again as soon as it is answered."""
    done = 0
    began_s = time.perf_counter()

    async def ask(first: int) -> None:
        nonlocal done
        async with HttpConnection(port) as connection:
            for number in count(first):
                status, _ = await connection.ask(requests[number % len(requests)])
                assert status == 200, status
                done += 1
                if time.perf_counter() - began_s > seconds:
                    return

    await asyncio.gather(*(ask(7 * number) for number in range(connections)))
    return done / (time.perf_counter() - began_s)
