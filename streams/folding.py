"""What a worker does with the records it takes: decode, fold, store, and set aside what cannot be read."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import structlog

from index.fold import Cursor, Flush, fold
from index.store import Applied, Store
from ops.metrics import STREAM_BLOCKS, STREAM_DEAD_LETTERS, STREAM_FLUSH, STREAM_RECORDS, STREAM_RETRIES, STREAM_WRITES
from schemas.errors import FrameError, StoreUnavailable
from schemas.events import BlocksRemoved, BlocksStored, Record, decode_record
from schemas.profiles import Holder

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


class Taken(NamedTuple):
    """One Kafka record as it was read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes


class DeadLetter(NamedTuple):
    """A record that could not be read, why, and where it stood."""

    topic: str
    record: Taken
    reason: str
    detail: str


SetAside = Callable[[DeadLetter], Awaitable[None]]
AskAgain = Callable[[str, Holder], Awaitable[None]]


class Folder:
    """Folds one model's records into a store; a record is done with once `fold` returned."""

    def __init__(self, model: str, topic: str, store: Store, set_aside: SetAside, ask_again: AskAgain) -> None:
        self.topic_id = ""  # of the topic as it was assigned
        self.folded = 0  # records so far, dead letters included
        self._model = model
        self._topic = topic
        self._store = store
        self._set_aside = set_aside
        self._ask_again = ask_again

    async def fold(self, taken: Sequence[Taken]) -> None:
        """Bring the records into the store; their cursor moves in the same step.

        Waits for Redis and for the dead-letter topic as long as it takes; that is the backpressure.

        Raises:
            StaleIndex: the store lost its data; the worker must begin again.
        """
        by_partition: dict[int, list[Taken]] = {}
        for record in taken:
            by_partition.setdefault(record.partition, []).append(record)
        await asyncio.gather(*(self._fold_partition(number, part) for number, part in by_partition.items()))
        self.folded += len(taken)

    async def _fold_partition(self, partition: int, taken: Sequence[Taken]) -> None:
        records: list[Record] = []
        for record in taken:
            try:
                records.append(decode_record(record.value))
            except FrameError as error:
                STREAM_DEAD_LETTERS.labels(self._topic, error.reason).inc()
                log.warning(
                    "stream.record_set_aside",
                    topic=self._topic,
                    partition=partition,
                    offset=record.offset,
                    reason=error.reason,
                    detail=error.detail,
                )
                await self._set_aside(DeadLetter(self._topic, record, error.reason, error.detail))
        cursor = Cursor(self.topic_id, partition, taken[-1].offset + 1)
        applied = await self._apply(Flush(self._model, cursor, fold(records)))
        STREAM_RECORDS.labels(self._topic).inc(len(taken))
        STREAM_BLOCKS.labels(self._topic).inc(_blocks(records))
        for outcome in ("applied", "repeated", "refused", "gaps"):
            STREAM_WRITES.labels(outcome).inc(getattr(applied, outcome))
        if applied.gaps:
            await self._ask_broken(records)

    async def _apply(self, flush: Flush) -> Applied:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                with STREAM_FLUSH.time():
                    return await self._store.apply(flush)
            except StoreUnavailable as error:
                STREAM_RETRIES.inc()
                log.warning("stream.store_unavailable", topic=self._topic, error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _ask_broken(self, records: Sequence[Record]) -> None:
        """Ask the relays of holders that lost records to tell everything again."""
        named = {record.holder for record in records}
        for row in await self._store.holders(self._model):
            if row.broken and row.holder in named:
                await self._ask_again(self._model, row.holder)


def _blocks(records: Sequence[Record]) -> int:
    return sum(
        len(event.blocks) // 8
        for record in records
        for event in record.events
        if isinstance(event, BlocksStored | BlocksRemoved)
    )
