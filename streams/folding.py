"""What a worker does with the records it takes: decode, fold, store, and set aside what cannot be read."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog

from index.fold import Cursor, Flush, HolderWrite, fold
from index.store import REBUILDING, Applied, Store
from ops.metrics import STREAM_BLOCKS, STREAM_DEAD_LETTERS, STREAM_FLUSH, STREAM_RECORDS, STREAM_RETRIES, STREAM_WRITES
from ops.pauses import Pauses
from schemas.errors import FrameError, StoreUnavailable
from schemas.events import BlocksRemoved, BlocksStored, Heartbeat, Record, decode_record
from schemas.profiles import Holder

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
# A heartbeat this old, with this much of its log behind it, does not tell how its holder is now. Both: where clocks
# differ a worker that keeps up is not misled, and what it reads a moment later corrects the rest.
_LATE_S = 10.0
_LATE_RECORDS = 200
_SILENT_S = 10.0  # a life that says nothing for so long has ended, where another relay of its holder speaks


class Taken(NamedTuple):
    """One Kafka record as it was read."""

    partition: int
    offset: int
    time_s: float  # since 1970, by the clock of who wrote it
    key: bytes | None
    value: bytes


class DeadLetter(NamedTuple):
    """A record that could not be read, why, and where it stood."""

    topic: str
    record: Taken
    reason: str
    detail: str


class Part(NamedTuple):
    """What was taken of one partition, ready for the store."""

    partition: int
    taken: int  # records
    next_offset: int
    records: list[Record]
    refused: list[DeadLetter]
    writes: list[HolderWrite]


EndOf = Callable[[int], int | None]
"""Return the next offset of a partition's log, as far as the consumer has heard."""

SetAside = Callable[[DeadLetter], Awaitable[None]]
AskAgain = Callable[[str, Holder], Awaitable[None]]


class Folder:
    """Folds one model's records into a store; a record is done with once `fold` returned."""

    def __init__(
        self,
        model: str,
        topic: str,
        store: Store,
        set_aside: SetAside,
        ask_again: AskAgain,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.topic_id = ""  # of the topic as it was assigned
        self.folded = 0  # records so far, dead letters included
        self._model = model
        self._topic = topic
        self._store = store
        self._set_aside = set_aside
        self._ask_again = ask_again
        self._clock_s = clock_s

    def read(self, taken: Sequence[Taken], end_of: EndOf) -> list[Part]:
        """Return the records decoded and folded, by partition.

        Heartbeats from long ago, which a worker meets that has to catch up, come out as `unknown: rebuilding`.
        """
        by_partition: dict[int, list[Taken]] = {}
        for record in taken:
            by_partition.setdefault(record.partition, []).append(record)
        return [self._read_partition(number, part, end_of(number)) for number, part in by_partition.items()]

    async def store(self, parts: Sequence[Part]) -> None:
        """Bring what was read into the store; each partition's cursor moves in the same step.

        Parts must be stored in the order in which they were read. Waits for Redis and for the dead-letter topic as
        long as it takes; that is the backpressure.

        Raises:
            StaleIndex: the store lost its data; the worker must begin again.
        """
        await asyncio.gather(*(self._store_part(part) for part in parts))

    def _read_partition(self, partition: int, taken: Sequence[Taken], end: int | None) -> Part:
        late_before_s = self._clock_s() - _LATE_S
        late_before = taken[-1].offset + 1 if end is None else end - _LATE_RECORDS
        records: list[Record] = []
        refused: list[DeadLetter] = []
        for record in taken:
            try:
                said = decode_record(record.value)
            except FrameError as error:
                refused.append(DeadLetter(self._topic, record, error.reason, error.detail))
                continue
            late = record.time_s < late_before_s and record.offset < late_before
            records.append(_of_the_past(said) if late else said)
        return Part(partition, len(taken), taken[-1].offset + 1, records, refused, fold(records))

    async def _store_part(self, part: Part) -> None:
        await self._set_all_aside(part)
        applied = await self._apply(
            Flush(self._model, Cursor(self.topic_id, part.partition, part.next_offset), part.writes)
        )
        self.folded += part.taken
        STREAM_RECORDS.labels(self._topic).inc(part.taken)
        STREAM_BLOCKS.labels(self._topic).inc(_blocks(part.records))
        for outcome in ("applied", "repeated", "refused", "gaps"):
            STREAM_WRITES.labels(outcome).inc(getattr(applied, outcome))
        if applied.gaps or applied.refused:
            await self._ask_unheard(part.records)

    async def _set_all_aside(self, part: Part) -> None:
        """Write a part's dead letters, in order and together, for valid records wait behind them."""
        if not part.refused:
            return
        first = part.refused[0]
        log.warning(
            "stream.records_set_aside",
            topic=self._topic,
            partition=part.partition,
            count=len(part.refused),
            offset=first.record.offset,
            reason=first.reason,
            detail=first.detail,
        )
        for letter in part.refused:
            STREAM_DEAD_LETTERS.labels(self._topic, letter.reason).inc()
        await asyncio.gather(*map(self._set_aside, part.refused))

    async def _apply(self, flush: Flush) -> Applied:
        pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                with STREAM_FLUSH.time():
                    return await self._store.apply(flush)
            except StoreUnavailable as error:
                STREAM_RETRIES.inc()
                pause_s = pauses.next_s()
                log.warning("stream.store_unavailable", topic=self._topic, error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)

    async def _ask_unheard(self, records: Sequence[Record]) -> None:
        """Ask relays to tell everything again: of holders that lost records, or whose higher life fell silent.

        The latter had two relays, and the one that was believed is gone. What is missed here is asked for later.
        """
        lives = {record.holder: record.life for record in records}
        try:
            rows = await self._store.holders(self._model)
        except StoreUnavailable as error:
            log.warning("stream.store_unavailable", topic=self._topic, error=str(error))
            return
        for row in rows:
            life = lives.get(row.holder, row.life)
            silent = row.age_s is not None and row.age_s > _SILENT_S
            if row.holder in lives and (row.broken or (silent and life < row.life)):
                await self._ask_again(self._model, row.holder)


def _of_the_past(record: Record) -> Record:
    """Return the record as it is read long after it was said: heartbeats do not vouch for their holder."""
    if not any(isinstance(event, Heartbeat) for event in record.events):
        return record
    events = (
        Heartbeat("unknown", event.received, event.share_known, REBUILDING) if isinstance(event, Heartbeat) else event
        for event in record.events
    )
    return msgspec.structs.replace(record, events=tuple(events))


def _blocks(records: Sequence[Record]) -> int:
    return sum(
        len(event.blocks) // 8
        for record in records
        for event in record.events
        if isinstance(event, BlocksStored | BlocksRemoved)
    )
