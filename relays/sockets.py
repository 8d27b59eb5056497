"""The ZMQ side of one engine rank: a SUB socket for what is published, a DEALER for each replay."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from schemas.errors import FrameError

END_MARK = (1 << 64) - 1
_RECEIVE_MARK = 200_000  # messages; the engines' own send mark is 100,000


class EngineSocket:
    """Receives a rank's published messages for as long as it runs; reconnects by itself."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self.connected = False
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()

    async def receive(
        self, on_message: Callable[[Sequence[bytes]], None], on_connection: Callable[[bool], None]
    ) -> None:
        """Call back for every message and for every change of the connection, until cancelled."""
        socket = self._context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        watch = asyncio.create_task(self._watch(monitor, on_connection))
        try:
            socket.rcvhwm = _RECEIVE_MARK
            # a subscription is a prefix: `kv@a` also matches `kv@ab`, so the topic is compared again below
            socket.subscribe(self._topic)
            socket.connect(self._endpoint)
            while True:
                frames = await socket.recv_multipart()
                if not self._topic or frames[0] == self._topic:
                    on_message(frames)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def replay(self, start: int, on_message: Callable[[int, bytes], None], timeout_s: float) -> bool:
        """Ask for all buffered messages from `start` on; return whether the end mark came.

        Each request has a socket of its own, so that late answers to an earlier one are never taken for this one's.
        """
        if self._replay_endpoint is None:
            return False
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.rcvhwm = 0
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                try:
                    frames = await asyncio.wait_for(socket.recv_multipart(), timeout_s)
                except TimeoutError:
                    return False
                sequence, payload = unframe_replay(frames)
                if sequence == END_MARK:
                    return True
                on_message(sequence, payload)
        finally:
            socket.close(0)

    async def _watch(self, monitor: zmq.asyncio.Socket, on_connection: Callable[[bool], None]) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            self.connected = event["event"] == zmq.EVENT_CONNECTED
            on_connection(self.connected)


def unframe_replay(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return (sequence, payload) of a replay's message, with or without a topic frame; all ones: the end mark.

    Up to vLLM 0.25 and SGLang 0.5.21 `[empty, sequence, payload]`, later `[empty, topic, sequence, payload]`.

    Raises:
        FrameError: neither.
    """
    if len(frames) not in (3, 4) or len(frames[-2]) != 8:
        raise FrameError("replay_frames", f"{len(frames)} frames")
    return int.from_bytes(frames[-2], "big"), frames[-1]
