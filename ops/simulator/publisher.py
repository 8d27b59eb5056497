"""One rank's sockets: PUB for its batches, ROUTER for replays of the last of them.

Source: vLLM's distributed/kv_events.py ZmqEventPublisher, 0.12 to 0.32, and SGLang's, which has the same ancestor
(engines/other-engines.md 1.1).
"""

from collections import deque
from typing import Protocol

import structlog
import zmq
import zmq.asyncio

from ops.simulator.settings import ServerSettings
from schemas.errors import ConfigError

END_SEQUENCE = b"\xff" * 8
_HIGH_WATER = 100_000  # messages for each subscriber; more are dropped silently, as by the engines

log = structlog.get_logger()


class Framing(Protocol):
    """What a version's replays look like."""

    @property
    def replay_topic(self) -> bool:
        """Return whether a replay's messages name the topic."""


class Publisher:
    """Numbers batches from 0 and keeps the last `buffer_steps` of them."""

    def __init__(self, settings: ServerSettings, rank: int, framing: Framing) -> None:
        """Bind both sockets.

        Raises:
            ConfigError: a port is taken; the message names the setting.
        """
        self._name = settings.name
        self._rank = rank
        self._topic = settings.topic.encode()
        self._replay_topic = framing.replay_topic
        self._sequence = 0
        self._ring: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._context = zmq.asyncio.Context()
        self._publications = self._context.socket(zmq.PUB)
        self._publications.set_hwm(_HIGH_WATER)
        # its queue stays at ZMQ's 1000, as the engines': a long replay to a slow reader loses messages
        self._replays = self._context.socket(zmq.ROUTER)
        try:
            bind(self._publications, "events_port", settings.host, settings.events_port + rank)
            if settings.replay_port:
                bind(self._replays, "replay_port", settings.host, settings.replay_port + rank)
        except ConfigError:
            self.close()
            raise

    async def publish(self, payload: bytes) -> None:
        """Send a batch, and keep it."""
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._ring.append((sequence, payload))
        await self._publications.send_multipart((self._topic, sequence, payload))

    async def serve_replays(self) -> None:
        """Answer replay requests, one at a time, until cancelled."""
        while True:
            frames = await self._replays.recv_multipart()
            if len(frames) != 3:
                # engines answer nothing here, not even the end mark
                log.warning("simulator.replay_refused", replica=self._name, rank=self._rank, parts=len(frames))
                continue
            client, _, start = frames
            await self._replay(client, int.from_bytes(start, "big"))

    def close(self) -> None:
        """Close both sockets and drop what is not sent."""
        self._context.destroy(linger=0)

    async def _replay(self, client: bytes, start: int) -> None:
        """Send what the ring has from `start` on, then the end mark; what fell out of it is left out silently."""
        topic = (self._topic,) if self._replay_topic else ()
        for sequence, payload in list(self._ring):
            if int.from_bytes(sequence, "big") >= start:
                await self._replays.send_multipart((client, b"", *topic, sequence, payload))
        end = (b"",) if self._replay_topic else ()  # of the end mark the topic is empty
        await self._replays.send_multipart((client, b"", *end, END_SEQUENCE, b""))


def bind(socket: zmq.asyncio.Socket, setting: str, host: str, port: int) -> None:
    """Bind a socket to a TCP port.

    Raises:
        ConfigError: the port is taken; the message names the setting.
    """
    endpoint = f"tcp://{host}:{port}"
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{setting}: {endpoint}: {error}") from error
