"""A store's publisher on loopback: one socket and one counter over all of its topics, without any replay.

The socket is an XPUB, which differs from a PUB in that it hears of subscriptions.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from ops.embedded.processes import LOOPBACK, free_ports


class FakeStore:
    """Numbers and publishes messages, loses some, dies and begins anew under the same address."""

    def __init__(self, first: int = 1) -> None:
        self.endpoint = f"tcp://{LOOPBACK}:{free_ports(1)[0]}"
        self.next = self._first = first
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        """Open the socket, as soon as the port is free."""
        self._socket = self._context.socket(zmq.XPUB)
        async with asyncio.timeout(10.0):
            while True:
                try:
                    self._socket.bind(self.endpoint)
                except zmq.ZMQError:
                    await asyncio.sleep(0.01)
                else:
                    return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """Die."""
        self._socket.close(0)

    async def start(self, *, anew: bool = True) -> None:
        """Live again; `anew`: the counter begins again, as that of another process."""
        if anew:
            self.next = self._first
        await self.__aenter__()

    async def subscribed(self) -> None:
        """Wait until one more subscriber hears what is published."""
        async with asyncio.timeout(60.0):
            while not (await self._socket.recv()).startswith(b"\1"):
                pass

    def lose(self) -> None:
        """Use up a number that no subscriber gets."""
        self.next += 1

    async def publish(self, frames: Sequence[bytes]) -> None:
        """Publish topic and payload of these frames under the next number."""
        topic, _, payload = frames
        sequence, self.next = self.next, self.next + 1
        await self._socket.send_multipart([topic, sequence.to_bytes(8, "big"), payload])
        await asyncio.sleep(0)
