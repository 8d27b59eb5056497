"""Guards on Faust's aiokafka transport, without which it loses records; needs exactly the pinned versions.

Stock Faust 0.15.3 commits past records that were never acknowledged: the first commit and a hole at the head are
not checked, and an offset that a compacted or transactional topic left out counts as part of a gap. Here only what
was handed out and acknowledged, in order, is committed. A start reads on at the store's cursor, never at Kafka's
committed offset, and a cursor outside the log (trimmed, or the topic was made anew) starts at the log's first record
instead of dropping everything below the cursor. A log that begins anew under a running consumer is told, where Faust
would drop all below the last offset. Source: measured on Kafka 4.3.1, streams/README.md.
"""

import asyncio
import types
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

import faust
from aiokafka.errors import KafkaError
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

LoadCursors = Callable[[set[TP]], Awaitable[dict[TP, int]]]
"""Return the next offset to read of every partition that was read before."""

OnRange = Callable[[TP, int | None, int, int], None]
"""Hear of records that nobody can read any more: partition, cursor or None, first and next offset of the log."""

OnBack = Callable[[TP, int, int], None]
"""Hear of a log that went back: partition, offset that came, offset that was expected or a later one."""

_LEAVE_S = 1.0
_FETCH_WAIT_MS = 500  # Faust fixes 1500; Kafka wakes a waiting fetch when data comes


class _Thread(driver.AIOKafkaConsumerThread):
    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = _FETCH_WAIT_MS
        return consumer


async def _finish(started: Coroutine[Any, Any, None], waits_for: Any) -> None:
    """Finish a coroutine that was started by hand and waits for something."""
    await _rest(started, waits_for)


@types.coroutine
def _rest(started: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    try:
        yield waits_for
    except BaseException as error:  # cancelled meanwhile
        started.throw(error)
        raise
    yield from started


class _Consumer(driver.Consumer):
    load_cursors: LoadCursors
    on_range: OnRange
    on_back: OnBack

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._handed_out: defaultdict[TP, deque[int]] = defaultdict(deque)  # and not committed yet
        self._expected: dict[TP, int] = {}  # least offset that may come next

    def _new_consumer_thread(self) -> _Thread:
        return _Thread(self, loop=self.loop, beacon=self.beacon)

    async def perform_seek(self) -> None:
        """Read on at the store's cursors; runs after every assignment (`on_rebalance_complete` fires too early)."""
        await super().perform_seek()
        self._handed_out.clear()
        self._expected.clear()
        partitions = {tp for tp in self.assignment() if not self._is_changelog_tp(tp)}
        if not partitions:
            return
        cursors = await type(self).load_cursors(partitions)
        first = await self.earliest_offsets(*partitions)
        end = await self.highwaters(*partitions)
        for tp in partitions:
            cursor = cursors.get(tp)
            offset = first[tp] if cursor is None or not first[tp] <= cursor <= end[tp] else cursor
            if cursor != offset and (cursor is not None or offset > 0):
                type(self).on_range(tp, cursor, first[tp], end[tp])
            await self._seek(tp, offset)
            # Faust skips what lies at or below the last offset read
            self._read_offset[tp] = self._committed_offset[tp] = offset or None
            self._expected[tp] = offset
            for known in (self._acked, self._acked_index, self._gap):
                known.pop(tp, None)

    async def wait_first(self, *coros: Any, timeout: Any = None) -> Any:
        """Hand a message out at once where nothing has to be waited for, which is nearly always.

        Faust's drain loop waits for the delivery or for a rebalance, whichever comes first, and spends four tasks a
        message on that: a third of the worker's time (`make bench`). No other caller waits for two things.
        """
        if len(coros) != 2 or timeout is not None:
            return await super().wait_first(*coros, timeout=timeout)
        delivery, rebalance = coros
        try:
            waits_for = delivery.send(None)
        except StopIteration:
            rebalance.close()
            return None
        return await super().wait_first(_finish(delivery, waits_for), rebalance)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, Any]]:
        """Yield messages, remembering what is handed out, in order."""
        async for tp, message in super().getmany(timeout):
            offset, expected = message.offset, self._expected.get(tp, 0)
            if offset < expected:
                type(self).on_back(tp, offset, expected)
            self._expected[tp] = offset + 1
            read = self._read_offset[tp]
            fresh = read is None or offset >= read
            if fresh and self.app.topics.acks_enabled_for(message.topic):
                self._handed_out[tp].append(offset)
            yield tp, message

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Do nothing: Faust's gap would include the record after the hole, which then needs no ack."""

    def _new_offset(self, tp: TP) -> int | None:
        """Return the offset to commit: all that was handed out before it is acknowledged."""
        handed_out, acked = self._handed_out[tp], self._acked_index[tp]
        offset = None
        while handed_out and handed_out[0] in acked:
            offset = handed_out.popleft() + 1
            acked.discard(offset - 1)
        if offset is not None:
            self._acked[tp][:] = [other for other in self._acked[tp] if other >= offset]
        return offset


def end_of(app: faust.App, tp: TP) -> int | None:
    """Return the next offset of a partition's log, as far as the consumer has heard; None where it is not ours."""
    end: int | None = app.consumer.highwater(tp) if tp in app.consumer.assignment() else None
    return end


def lags(app: faust.App) -> dict[TP, int]:
    """Return for each assigned partition how many records are not acknowledged, as far as the consumer has heard."""
    consumer, waiting = app.consumer, {}
    for tp in consumer.assignment():
        end, handed_out = end_of(app, tp), consumer._handed_out[tp]
        position = handed_out[0] if handed_out else consumer._expected.get(tp)
        if end is not None and position is not None:
            waiting[tp] = max(0, end - position)
    return waiting


def group_error(app: faust.App) -> BaseException | None:
    """Return why this consumer cannot be a member of its group, if so; Faust asks only for records, and so never."""
    coordinator = _coordinator(app)
    if coordinator is None:
        return None
    error: BaseException | None = coordinator._pending_exception
    routine = coordinator._coordination_task
    if error is None and routine.done() and not routine.cancelled():
        error = routine.exception()
    return error


def _coordinator(app: faust.App) -> Any:
    thread = app.consumer._thread
    return None if thread is None or thread._consumer is None else thread._consumer._coordinator


def leave_group(app: faust.App) -> None:
    """Let others have our partitions at once, not when our session has run out; for a process that is about to end."""
    coordinator = _coordinator(app)
    if coordinator is None:
        return
    leaving = asyncio.run_coroutine_threadsafe(coordinator._maybe_leave_group(), app.consumer._thread.thread_loop)
    with suppress(TimeoutError, KafkaError):
        leaving.result(_LEAVE_S)


def guard(app: faust.App, load_cursors: LoadCursors, on_range: OnRange, on_back: OnBack) -> None:
    """Give the app the guarded transport; call it before declaring agents."""
    consumer = type(
        "GuardedConsumer",
        (_Consumer,),
        {
            "load_cursors": staticmethod(load_cursors),
            "on_range": staticmethod(on_range),
            "on_back": staticmethod(on_back),
        },
    )
    transport = type("GuardedTransport", (driver.Transport,), {"Consumer": consumer})
    app.transport = transport(app.conf.broker_consumer, app)
