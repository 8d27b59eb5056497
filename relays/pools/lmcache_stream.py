"""The gRPC side of a pool that is LMCache's multiprocess server: one subscription to one model's KV events.

The server numbers its records, keeps the newest (32 768 of all models by default) and sends those after the cursor that
a subscriber names. A batch that says `lost`, or another incarnation, voids all that was announced before; a lost
connection alone voids nothing, for the next subscription begins at the cursor, and the server says what it cannot
send again. Source: lmcache 0.5.6, v1/multiprocess/custom_types.py (KVEventBatch), modules/kv_events.py
(subscribe_kv_events, read_kv_events).
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Literal
from uuid import uuid4

import grpc
import grpc.aio
import structlog

from ops.metrics import RELAY_MESSAGES, RELAY_REJECTS
from ops.pauses import Pauses
from relays.engine_events import Decoded
from relays.lmcache_mp import MAX_BATCH_BYTES, KvBatch, decode_lmcache
from schemas.errors import ConfigError, FrameError
from schemas.lmcache_mp import PING, SUBSCRIBE, encode_ping, encode_subscribe

ENGINE = "lmcache"
_TAIL = 1 << 62  # a cursor above every record: answered with the newest one's number and `lost`
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # before the next connection
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_BATCH_BYTES),
    ("grpc.enable_http_proxy", 0),  # the server stands beside
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, whatever an earlier one has met
)

Step = Literal["next", "lost", "restarted", "again"]
"""A batch follows; follows a loss; is the first of another run; or is to be asked for again, from that run's start."""


class StreamEnded(Exception):
    """The server closed the subscription, or does not answer."""


class StreamCursor:
    """How far one subscriber has read the log of which run of the server; pure."""

    def __init__(self) -> None:
        self.position = 0  # the next subscription asks for what follows
        self._incarnation: int | None = None

    def take(self, batch: KvBatch) -> Step:
        """Take a batch; a run counts from 1 again, so an earlier run's cursor hides the first of its records."""
        asked, known = self.position, self._incarnation
        self._incarnation = batch.incarnation
        other = known not in (None, batch.incarnation)
        if other and asked:
            self.position = 0
            return "again"
        self.position = batch.decoded.sequence
        return "restarted" if other else "lost" if batch.lost else "next"

    def skip(self) -> None:
        """Go on behind all that the log holds: something in it cannot be read."""
        self.position = _TAIL


class KvEventStream:
    """Follows one model's events of one server for as long as it runs; reconnects by itself.

    `on_events` gets the server's name of the model and what a batch says; its sequence is the cursor. `on_restart`: all
    that was announced before is void. `on_gap`: events were missed, none of which can make what is known wrong (nothing
    is known); what they announced stays unknown. `on_connection`: whether the server is heard, at each change.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        chunk: int,
        *,
        on_events: Callable[[str, Decoded], None],
        on_restart: Callable[[str], None],
        on_gap: Callable[[str], None],
        on_connection: Callable[[bool], None],
        ping_s: float = 10.0,
        timeout_s: float = 10.0,
    ) -> None:
        """Prepare a subscription.

        Args:
            endpoint: `grpc://host:port`.
            model: the server's name of it.
            chunk: tokens of the server's chunks.
            ping_s: how often the server is told that somebody listens; LMCache's own workers do so every 10 s.
            timeout_s: how long a connection with its first batch, or a ping, may take.
        Raises:
            ConfigError: no gRPC address.
        """
        self._target = target_of(endpoint)
        self._model = model
        self._chunk = chunk
        self._on_events = on_events
        self._on_restart = on_restart
        self._on_gap = on_gap
        self._on_connection = on_connection
        self._ping_s = ping_s
        self._timeout_s = timeout_s
        # another subscription of the same number would end this one
        self._instance = uuid4().int & ((1 << 63) - 1)
        self._cursor = StreamCursor()
        self._announced = False  # something that would have to be withdrawn
        self._connected: bool | None = None
        self._heard = False  # a batch came over this connection
        self._log = structlog.get_logger().bind(pool=endpoint, model=model)

    async def run(self) -> None:
        """Follow the events until cancelled."""
        pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            self._heard = False
            try:
                async with grpc.aio.insecure_channel(self._target, options=_OPTIONS) as channel:
                    await self._follow(channel)
                continue  # the same server, from its start
            except FrameError as error:
                reason = str(error)
                self._skip(error.reason, error.detail)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
                    self._skip("payload_bytes", reason)
            except StreamEnded as error:
                reason = str(error)
            self._tell_connection(False, reason)
            if self._heard:
                pauses.reset()
            await asyncio.sleep(pauses.next_s() * random.uniform(0.8, 1.0))

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Subscribe and take what comes; return where the log must be read from its start."""
        loop = asyncio.get_running_loop()
        subscribe: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(SUBSCRIBE)
        call = subscribe(encode_subscribe(self._instance, self._model, self._cursor.position))
        reading = asyncio.ensure_future(call.read())
        ping_at_s = loop.time() + self._ping_s
        wait_s = self._timeout_s  # a subscription is answered at once
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=wait_s)
                if done:
                    payload = reading.result()
                    if not isinstance(payload, bytes):  # grpc.aio.EOF
                        raise StreamEnded("the server closed the subscription")
                    if not self._take(payload):
                        return
                    reading = asyncio.ensure_future(call.read())
                elif not self._heard:
                    raise StreamEnded(f"no answer within {self._timeout_s} s")
                if loop.time() >= ping_at_s:
                    await self._ping(channel, reading)
                    ping_at_s = loop.time() + self._ping_s
                wait_s = max(0.0, ping_at_s - loop.time())
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()  # it is known already, or nobody's any more

    async def _ping(self, channel: grpc.aio.Channel, reading: "asyncio.Future[Any]") -> None:
        """Tell the server that somebody listens; one that neither answers nor sends is given up."""
        ping: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(PING)
        try:
            await ping(encode_ping(self._instance), timeout=self._timeout_s)
        except grpc.aio.AioRpcError:
            if not reading.done():
                raise

    def _take(self, payload: bytes) -> bool:
        """Take one message; return whether the subscription is to go on."""
        batch = decode_lmcache(payload, self._model, self._chunk, time.time())
        RELAY_MESSAGES.labels(ENGINE, "published").inc()
        if not batch.enabled:
            self._void("events_disabled")
            raise StreamEnded("the server keeps no log of its events")
        step = self._cursor.take(batch)
        if step == "lost":
            self._void("events_lost")
        elif step != "next":
            self._void("server_restarted")
        if step == "again":
            return False
        self._heard = True
        self._tell_connection(True)
        self._announced |= bool(batch.decoded.events)
        self._on_events(self._model, batch.decoded)
        return True

    def _skip(self, reason: str, detail: str) -> None:
        RELAY_REJECTS.labels(ENGINE, reason).inc()
        self._log.warning("relay.message_refused", reason=reason, detail=detail)
        self._void("message_refused")
        self._cursor.skip()

    def _void(self, reason: str) -> None:
        """Say that nothing announced before holds, or where nothing was, that it was missed."""
        if self._announced:
            self._announced = False
            self._on_restart(reason)
        elif reason != "server_restarted":
            self._on_gap(reason)

    def _tell_connection(self, connected: bool, reason: str = "") -> None:
        if connected is self._connected:
            return
        self._connected = connected
        if connected:
            self._log.info("relay.connected")
        else:
            self._log.warning("relay.disconnected", reason=reason)
        self._on_connection(connected)


def target_of(endpoint: str) -> str:
    """Return what gRPC connects to.

    Raises:
        ConfigError: not of the form `grpc://host:port`.
    """
    scheme, _, target = endpoint.rpartition("://")
    host, _, port = target.rpartition(":")
    if scheme not in ("", "grpc") or not host or not port.isdecimal():
        raise ConfigError(f"endpoint: {endpoint!r} is no gRPC address; grpc://host:port")
    return target
