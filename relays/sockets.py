"""The ZMQ side of one engine rank: a SUB socket for what is published, a DEALER for each replay."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message, recv_monitor_message

from schemas.errors import ConfigError, FrameError
from schemas.events import MAX_NUMBER

END_MARK = (1 << 64) - 1
_RECEIVE_MARK = 200_000  # messages; the engines' own send mark is 100,000
_AT_ONCE = 32  # messages before others get their turn: receiving does not wait while messages are there
_PING_MS, _PONG_MS = 5_000, 15_000  # a peer that is gone without a word, or frozen, is noticed


class EngineSocket:
    """Receives a rank's published messages for as long as it runs; reconnects by itself."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()

    @property
    def has_replay(self) -> bool:
        """Return whether there is anybody to ask for a replay."""
        return self._replay_endpoint is not None

    async def receive(
        self, on_message: Callable[[Sequence[bytes]], None], on_connection: Callable[[bool], None]
    ) -> None:
        """Call back for every message and every change of the connection, in their order, until cancelled."""
        socket = self._context.socket(zmq.SUB)
        # a TCP connection alone is none: a frozen engine's kernel still accepts those
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        events: zmq.Socket[bytes] = zmq.Socket.shadow(monitor)

        def tell(event: Mapping[str, object]) -> None:
            on_connection(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

        async def watch() -> None:
            while True:
                tell(await recv_monitor_message(monitor))

        watching = asyncio.create_task(watch())
        try:
            socket.rcvhwm = _RECEIVE_MARK
            socket.heartbeat_ivl, socket.heartbeat_timeout = _PING_MS, _PONG_MS
            # a subscription is a prefix: `kv@a` also matches `kv@ab`, so the topic is compared again below
            socket.subscribe(self._topic)
            socket.connect(self._endpoint)
            received = 0
            while True:
                frames = await socket.recv_multipart()
                # what happened to the connection before this message came is told before it
                with suppress(zmq.Again):
                    while True:
                        tell(parse_monitor_message(events.recv_multipart(zmq.NOBLOCK)))
                if not self._topic or frames[0] == self._topic:
                    on_message(frames)
                received += 1
                if received % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def replay(
        self,
        start: int,
        on_message: Callable[[int, bytes], None],
        on_refused: Callable[[FrameError], None],
        timeout_s: float,
    ) -> bool:
        """Ask for all buffered messages from `start` on; return whether the end mark came.

        Each request has a socket of its own, so that late answers to an earlier one are never taken for this one's.
        """
        if self._replay_endpoint is None:
            return False
        socket = self._context.socket(zmq.DEALER)
        loop = asyncio.get_running_loop()
        try:
            socket.rcvhwm = 0
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            received = 0
            async with asyncio.timeout(timeout_s) as patience:
                while True:
                    frames = await socket.recv_multipart()
                    patience.reschedule(loop.time() + timeout_s)
                    try:
                        sequence, payload = unframe_replay(frames)
                    except FrameError as error:
                        on_refused(error)
                        continue
                    if sequence == END_MARK:
                        return True
                    if self._topic and len(frames) == 4 and frames[1] != self._topic:
                        on_refused(FrameError("topic", f"{frames[1][:80]!r}, expected {self._topic!r}"))
                        continue
                    on_message(sequence, payload)
                    received += 1
                    if received % _AT_ONCE == 0:
                        await asyncio.sleep(0)
        except TimeoutError:
            return False
        finally:
            socket.close(0)


def check_address(endpoint: str) -> None:
    """Raise ConfigError where no socket can connect: a wildcard is what an engine binds to, not where it is."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    reachable = {"tcp": host not in ("", "*") and port.isdecimal() and 0 < int(port) < 1 << 16}.get(scheme, bool(place))
    if scheme not in ("tcp", "ipc", "inproc") or not reachable:
        raise ConfigError(f"endpoint: {endpoint!r} is no ZMQ address to connect to, for example tcp://10.0.0.7:5557")


def unframe_published(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return (sequence, payload) of a published message `[topic, sequence, payload]`, of all engines and stores.

    Raises:
        FrameError: `frame_count` or `sequence`: not three parts, or a number that no record can carry.
    """
    if len(frames) != 3:
        raise FrameError("frame_count", f"{len(frames)} frames, expected 3")
    if len(frames[1]) != 8:
        raise FrameError("sequence", f"{len(frames[1])} bytes, expected 8")
    sequence = int.from_bytes(frames[1], "big")
    if sequence > MAX_NUMBER:
        raise FrameError("sequence", f"{sequence}, at most {MAX_NUMBER}")
    return sequence, frames[2]


def unframe_replay(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return (sequence, payload) of a replay's message, with or without a topic frame; all ones: the end mark.

    Up to vLLM 0.25 and SGLang 0.5.21 `[empty, sequence, payload]`, later `[empty, topic, sequence, payload]`.

    Raises:
        FrameError: neither.
    """
    if len(frames) not in (3, 4) or len(frames[-2]) != 8:
        raise FrameError("replay_frames", f"{len(frames)} frames")
    return int.from_bytes(frames[-2], "big"), frames[-1]
