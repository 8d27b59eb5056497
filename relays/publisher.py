"""The Kafka side of a relay: an idempotent producer that is replaced when it fails, and what it still owes.

An idempotent aiokafka producer does not survive a failed batch: every later send to that partition fails with
OutOfOrderSequenceNumber (measured on Kafka 4.3.1). So a failure stops the producer, and a fresh one sends again,
in order, all that was not acknowledged; the fold's fence drops the repeats.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from ops.metrics import RELAY_PRODUCERS, RELAY_RECORDS

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_STOP_S = 10.0


class _Owed:
    """One record on its way, and the producer that has it."""

    __slots__ = ("done", "key", "producer", "topic", "value")

    def __init__(self, topic: str, key: bytes, value: bytes | None) -> None:
        self.topic = topic
        self.key = key
        self.value = value
        self.producer: AIOKafkaProducer | None = None
        self.done = False


class Publisher:
    """Sends records in order and at least once; `run` owns the producer, `put` waits while too much is owed."""

    def __init__(self, client: Mapping[str, Any], *, engine: str, in_flight: int, request_timeout_ms: int) -> None:
        self._client = dict(client)
        self._engine = engine
        self._in_flight = in_flight
        self._request_timeout_ms = request_timeout_ms
        self._owed: deque[_Owed] = deque()
        self._producer: AIOKafkaProducer | None = None
        self._failed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._nothing_owed = asyncio.Event()
        self._nothing_owed.set()

    @property
    def healthy(self) -> bool:
        """Return whether records reach Kafka now."""
        return self._producer is not None and not self._failed.is_set()

    async def wait_for_room(self) -> None:
        """Wait until fewer records are owed than may be in flight."""
        await self._room.wait()

    async def put(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Send a record after all earlier ones; returns before it is acknowledged."""
        owed = _Owed(topic, key, value)
        self._owed.append(owed)
        self._nothing_owed.clear()
        if len(self._owed) >= self._in_flight:
            self._room.clear()
        if self._producer is not None and not self._failed.is_set():
            await self._send(self._producer, owed)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is owed; return whether that came true in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._nothing_owed.wait()
        return not self._owed

    async def run(self) -> None:
        """Keep a producer alive until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._failed.clear()
            producer = AIOKafkaProducer(
                **self._client,
                enable_idempotence=True,
                acks="all",
                linger_ms=2,
                compression_type="lz4",
                request_timeout_ms=self._request_timeout_ms,
            )
            try:
                await producer.start()
                while unsent := [owed for owed in self._owed if owed.producer is not producer]:
                    for owed in unsent:
                        await self._send(producer, owed)
                self._producer = producer
                log.info("relay.producer_ready", owed=len(self._owed))
                await self._failed.wait()
                pause_s = _FIRST_PAUSE_S
            except (KafkaError, OSError) as error:
                log.warning("relay.broker_unavailable", error=str(error), pause_s=pause_s, owed=len(self._owed))
            finally:
                self._producer = None
                await _stop(producer)
            RELAY_PRODUCERS.inc()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _send(self, producer: AIOKafkaProducer, owed: _Owed) -> None:
        owed.producer = producer
        try:
            future = await producer.send(owed.topic, value=owed.value, key=owed.key)
        except (KafkaError, OSError) as error:
            self._fail(error)
            return
        future.add_done_callback(lambda done: self._acknowledged(owed, done))

    def _acknowledged(self, owed: _Owed, done: "asyncio.Future[Any]") -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            if owed.producer is self._producer:
                self._fail(error)
            return
        owed.done = True
        while self._owed and self._owed[0].done:
            self._owed.popleft()
            RELAY_RECORDS.labels(self._engine).inc()
        if len(self._owed) < self._in_flight:
            self._room.set()
        if not self._owed:
            self._nothing_owed.set()

    def _fail(self, error: BaseException) -> None:
        if not self._failed.is_set():
            log.warning("relay.producer_failed", error=f"{type(error).__name__}: {error}", owed=len(self._owed))
            self._failed.set()


async def _stop(producer: AIOKafkaProducer) -> None:
    with suppress(KafkaError, OSError, TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await producer.stop()
