"""An engine's sockets on loopback, which lose, forget, restart and talk nonsense as told; and what it has to say."""

import asyncio
import random
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from ops.embedded.processes import LOOPBACK, free_ports, listens
from tests.support.payloads import batch, map_removed, pack
from tests.support.vllm_frames import map_stored

END = b"\xff" * 8
TOPIC = b"kv"


class FakeEngine:
    """A PUB and a ROUTER socket on ports that are its own over restarts; what was published can be replayed."""

    def __init__(
        self, *, ring: int = 100_000, topic_in_replays: bool = True, ports: tuple[int, int] | None = None
    ) -> None:
        self.events, self.replay = (f"tcp://{LOOPBACK}:{port}" for port in ports or free_ports(2))
        self.topic_in_replays = topic_in_replays
        self.answers = True
        self.garbles = False  # answers have nonsense between their messages
        self.asked: list[int] = []  # where each replay was asked from
        self.next = 0
        self._ring: dict[int, bytes] = {}
        self._size = ring
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Open the sockets."""
        self._publisher, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._publisher.sndhwm = self._router.sndhwm = 0
        await _bind(self._publisher, self.events)
        await _bind(self._router, self.replay)
        self._tasks = [asyncio.create_task(self._answer())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets."""
        await self.stop()
        self._context.destroy(linger=0)

    async def stop(self) -> None:
        """Die; `restart` follows."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._publisher.close(0)
        self._router.close(0)

    async def restart(self) -> None:
        """Begin anew under the same addresses, at 0 and with an empty ring."""
        await self.stop()
        self.next = 0
        self._ring = {}
        await self.__aenter__()

    async def publish(self, payload: bytes) -> int:
        """Publish one message; return its sequence."""
        sequence = self.lose(payload)
        await self.send(TOPIC, sequence.to_bytes(8, "big"), payload)
        await asyncio.sleep(0)  # sending does not wait, and others here have to receive
        return sequence

    def lose(self, payload: bytes) -> int:
        """Take a message into the ring that is lost on its way to subscribers."""
        sequence, self.next = self.next, self.next + 1
        self._ring[sequence] = payload
        self._ring.pop(sequence - self._size, None)
        return sequence

    def message(self, sequence: int) -> bytes:
        """Return a message that the ring still has."""
        return self._ring[sequence]

    async def send(self, *frames: bytes) -> None:
        """Send any frames to the subscribers."""
        await self._publisher.send_multipart(frames)

    async def _answer(self) -> None:
        while True:
            identity, empty, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            topic = (TOPIC,) if self.topic_in_replays else ()
            for sequence, payload in list(self._ring.items()):
                if self.garbles:
                    await self._router.send_multipart([identity, b"nonsense", payload])
                if sequence >= self.asked[-1]:
                    await self._router.send_multipart([identity, empty, *topic, sequence.to_bytes(8, "big"), payload])
            end = (b"",) if self.topic_in_replays else ()
            await self._router.send_multipart([identity, empty, *end, END, b""])


def ports_in_a_row(count: int) -> list[int]:
    """Return that many consecutive ports that are free at the moment, as the ranks of one engine take them."""
    while True:
        (first,) = free_ports(1)
        ports = list(range(first, first + count))
        if not any(listens(port) for port in ports):
            return ports


async def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Bind as soon as the port is free again: closing goes on in the background."""
    async with asyncio.timeout(10.0):
        while True:
            try:
                socket.bind(endpoint)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)
            else:
                return


class Traffic:
    """Messages of an engine that stores and drops blocks of four tokens, the same for the same seed."""

    def __init__(self, seed: int = 0, rank: int = 0, clears: float = 0.02) -> None:
        self._rng = random.Random(seed)
        self._rank = rank
        self._clears = clears
        self._held: list[int] = []

    def message(self) -> bytes:
        """Return the next message: one to three events."""
        return pack(batch(*(self._event() for _ in range(self._rng.randint(1, 3))), rank=self._rank))

    def _event(self) -> dict[str, object]:
        choice = self._rng.random()
        if choice < self._clears:
            self._held = []
            return {"type": "AllBlocksCleared"}
        if choice < 0.35 and self._held:
            return map_removed(block_hashes=[self._held.pop(self._rng.randrange(len(self._held)))])
        parent = self._rng.choice([None, *self._held[-20:]])
        names = [self._rng.getrandbits(64) for _ in range(self._rng.randint(1, 5))]
        self._held += names
        return map_stored(
            block_hashes=names,
            parent_block_hash=parent,
            token_ids=[self._rng.randrange(1000) for _ in range(4 * len(names))],
        )
