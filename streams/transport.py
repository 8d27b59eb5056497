"""Guards on Faust's aiokafka transport, without which it loses records; needs exactly the pinned versions.

Stock Faust 0.15.3 commits past records that were never acknowledged: the first commit and a hole at the head are
not checked, and an offset that a compacted or transactional topic left out counts as part of a gap. Here only what
was handed out and acknowledged, in order, is committed. A start reads on at the store's cursor, never at Kafka's
committed offset, and a cursor outside the log (trimmed, or the topic was made anew) starts at the log's first record
instead of dropping everything below the cursor. A log that begins anew under a running consumer is told, where Faust
would drop all below the last offset. Source: measured on Kafka 4.3.1, streams/README.md.
"""

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

LoadCursors = Callable[[set[TP]], Awaitable[dict[TP, int]]]
"""Return the next offset to read of every partition that was read before."""

OnRange = Callable[[TP, int, int, int], None]
"""Hear of a cursor outside the log: partition, cursor, first and next offset of the log."""

OnBack = Callable[[TP, int, int], None]
"""Hear of a log that went back: partition, offset that came, offset that was expected or a later one."""

_FETCH_WAIT_MS = 500  # Faust fixes 1500; Kafka wakes a waiting fetch when data comes


class _Thread(driver.AIOKafkaConsumerThread):
    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = _FETCH_WAIT_MS
        return consumer


class _Consumer(driver.Consumer):
    load_cursors: LoadCursors
    on_range: OnRange
    on_back: OnBack

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._handed_out: defaultdict[TP, deque[int]] = defaultdict(deque)
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
            offset = cursors.get(tp, first[tp])
            if not first[tp] <= offset <= end[tp]:
                type(self).on_range(tp, offset, first[tp], end[tp])
                offset = first[tp]
            await self._seek(tp, offset)
            # Faust skips what lies at or below the last offset read
            self._read_offset[tp] = self._committed_offset[tp] = offset or None
            self._expected[tp] = offset
            for known in (self._acked, self._acked_index, self._gap):
                known.pop(tp, None)

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
