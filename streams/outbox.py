"""What a worker writes to Kafka: records that cannot be read, and requests to tell everything again."""

import asyncio

import faust
import structlog
from aiokafka.errors import MessageSizeTooLargeError

from ops.metrics import STREAM_RESYNCS
from ops.pauses import Pauses
from schemas.control import Resync, encode_control
from schemas.profiles import Holder
from schemas.topics import CONTROL, DEAD_LETTERS
from streams.folding import DeadLetter

log = structlog.get_logger()

ASK_AGAIN_S = 10.0
"""A relay has this long to answer before it is asked once more."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_CUT_BYTES = 500_000  # of a dead letter that Kafka refuses whole


class Outbox:
    """Writes with the app's producer, which is there once the worker has built the app."""

    def __init__(self) -> None:
        self.app: faust.App | None = None
        self._asked_s: dict[tuple[str, Holder], float] = {}

    async def set_aside(self, letter: DeadLetter) -> None:
        """Write a record to the dead letters; returns once Kafka has it, cut where Kafka takes no more of it."""
        record = letter.record
        headers = {
            "topic": letter.topic.encode(),
            "partition": str(record.partition).encode(),
            "offset": str(record.offset).encode(),
            "reason": letter.reason.encode(),
            "detail": letter.detail.encode(),
        }
        key = f"{letter.topic}/{record.partition}".encode()
        if await self._send(DEAD_LETTERS, key, record.value, headers):
            return
        headers["cut_from_bytes"] = str(len(record.value)).encode()
        if not await self._send(DEAD_LETTERS, key, record.value[:_CUT_BYTES], headers):
            log.error("stream.letter_refused", topic=letter.topic, partition=record.partition, offset=record.offset)

    async def ask_again(self, model: str, holder: Holder) -> None:
        """Ask a holder's relay to tell everything again, not more often than it can answer."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s.get((model, holder), -ASK_AGAIN_S) < ASK_AGAIN_S:
            return
        self._asked_s[model, holder] = now_s
        STREAM_RESYNCS.labels("records_lost").inc()
        log.warning("stream.resync_asked", model=model, holder=str(holder))
        request = Resync(holder.name, holder.rank, "records_lost")
        await self._send(CONTROL, holder.name.encode(), encode_control(request), {})

    async def _send(self, topic: str, key: bytes, value: bytes, headers: dict[str, bytes]) -> bool:
        """Return once Kafka has it, however long that takes; False where it is too large, which no waiting cures."""
        assert self.app is not None  # folders run inside the app only
        pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                await (await self.app.send(topic, key=key, value=value, headers=headers))
            except Exception as error:  # whatever the producer raises, the record must not be passed over
                if isinstance(error.__cause__ or error, MessageSizeTooLargeError):
                    log.warning("stream.send_refused", topic=topic, error=str(error))
                    return False
                log.warning("stream.send_failed", topic=topic, error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(pauses.next_s())
            else:
                return True
