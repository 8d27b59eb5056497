"""The Kafka side of a relay: an idempotent producer that is replaced when it fails, and what it still owes.

An idempotent aiokafka producer does not survive a failed batch: every later send to that partition fails with
OutOfOrderSequenceNumber (measured on Kafka 4.3.1). So a failure stops the producer, and a fresh one sends again,
in order, all that was not acknowledged; the fold's fence drops the repeats.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerClosed

from ops.metrics import RELAY_PRODUCERS, RELAY_RECORDS, RELAY_REJECTS
from ops.pauses import Pauses

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_STOP_S = 5.0
_HEALTHY_S = 5.0  # a record that waits longer for its acknowledgement tells of an outage


class _Owed:
    """One record on its way, and the producer that has it."""

    __slots__ = ("done", "key", "producer", "since_s", "topic", "value")

    def __init__(self, topic: str, key: bytes, value: bytes | None) -> None:
        self.topic = topic
        self.key = key
        self.value = value
        self.producer: AIOKafkaProducer | None = None
        self.since_s = time.monotonic()
        self.done = False


class Publisher:
    """Sends records in order and at least once; `run` owns the producer, `put` waits while too much is owed."""

    def __init__(self, client: Mapping[str, Any], *, engine: str, in_flight: int, request_timeout_ms: int) -> None:
        self._client = dict(client)
        self._engine = engine
        self._in_flight = in_flight
        self._request_timeout_ms = request_timeout_ms
        self._owed: deque[_Owed] = deque()
        self._producer: AIOKafkaProducer | None = None  # the one that sends
        self._ready = False  # it has all that was owed before it came
        self._failed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._nothing_owed = asyncio.Event()
        self._nothing_owed.set()

    @property
    def healthy(self) -> bool:
        """Return whether records reach Kafka now."""
        waiting_s = time.monotonic() - self._owed[0].since_s if self._owed else 0.0
        return self._ready and not self._failed.is_set() and waiting_s < _HEALTHY_S

    @property
    def owed(self) -> int:
        """Records that Kafka has not acknowledged."""
        return len(self._owed)

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
        if self._producer is not None and self._ready and not self._failed.is_set():
            # whoever puts may be cancelled while the producer is full; the record must not be
            await asyncio.shield(self._send(self._producer, owed))

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is owed; return whether that came true in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._nothing_owed.wait()
        return not self._owed

    async def run(self) -> None:
        """Keep a producer alive until cancelled; then what it has is flushed."""
        pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            pause_s = pauses.next_s()
            self._failed.clear()
            self._producer = producer = AIOKafkaProducer(
                **self._client,
                enable_idempotence=True,
                acks="all",
                linger_ms=2,
                compression_type="lz4",
                request_timeout_ms=self._request_timeout_ms,
            )
            try:
                await producer.start()
                await self._send_again(producer)
                await self._failed.wait()
                RELAY_PRODUCERS.inc()
                pauses.reset()
                pause_s = pauses.next_s()
            except (KafkaError, OSError) as error:
                log.warning("relay.broker_unavailable", error=str(error), pause_s=pause_s, owed=len(self._owed))
            finally:
                self._ready = False
                self._producer = None
                await _stop(producer, flush=not self._failed.is_set())
            await asyncio.sleep(pause_s)

    async def _send_again(self, producer: AIOKafkaProducer) -> None:
        """Send all that is owed, in order; meanwhile `put` adds to it and sends nothing."""
        while unsent := [owed for owed in self._owed if owed.producer is not producer]:
            for owed in unsent:
                await self._send(producer, owed)
                if self._failed.is_set():
                    return
        self._ready = True
        log.info("relay.producer_ready", owed=len(self._owed))

    async def _send(self, producer: AIOKafkaProducer, owed: _Owed) -> None:
        owed.producer = producer
        try:
            future = await producer.send(owed.topic, value=owed.value, key=owed.key)
        except MessageSizeTooLargeError as error:  # and so it would be the next time
            log.critical("relay.record_too_large", topic=owed.topic, error=str(error))
            RELAY_REJECTS.labels(self._engine, "record_too_large").inc()
            self._settle(owed)
        except (KafkaError, OSError) as error:
            self._fail(producer, error)
        else:
            future.add_done_callback(lambda done: self._acknowledged(producer, owed, done))

    def _acknowledged(self, producer: AIOKafkaProducer, owed: _Owed, done: "asyncio.Future[Any]") -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._settle(owed)
        else:
            self._fail(producer, error)

    def _settle(self, owed: _Owed) -> None:
        owed.done = True
        while self._owed and self._owed[0].done:
            self._owed.popleft()
            RELAY_RECORDS.labels(self._engine).inc()
        if len(self._owed) < self._in_flight:
            self._room.set()
        if not self._owed:
            self._nothing_owed.set()

    def _fail(self, producer: AIOKafkaProducer, error: BaseException) -> None:
        if producer is not self._producer or self._failed.is_set():
            return
        log.warning("relay.producer_failed", error=f"{type(error).__name__}: {error}", owed=len(self._owed))
        self._failed.set()
        _drop_unsent(producer)


def _drop_unsent(producer: AIOKafkaProducer) -> None:
    """Fail what the producer has not sent, so that it does not go out without the record that failed before it."""
    unsent = producer._message_accumulator._batches
    for batches in unsent.values():
        for batch in batches:
            batch.failure(ProducerClosed())
    unsent.clear()


async def _stop(producer: AIOKafkaProducer, *, flush: bool) -> None:
    """Close the producer; without `flush`, or past its time, nothing of what it has is waited for."""
    if flush:
        with suppress(KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await producer.stop()
                return
    # `stop` flushes first, which no broker may ever answer; cancelled in that, it would leave its tasks running
    producer._closed = True
    with suppress(KafkaError, OSError, TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await producer.client.close()
            await producer._sender.close()
