"""The agents: one for each model's event topic, thin; what they do with records is in folding.py."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import faust
import structlog
from faust.types import TP

from schemas.errors import StaleIndex
from streams.folding import Folder, Part, Taken
from streams.transport import end_of, leave_group

log = structlog.get_logger()

BUG = 70  # EX_SOFTWARE


def begin_again(app: faust.App | None) -> NoReturn:
    """Put a new process in this one's place, with its pid and its arguments: all that it believed is void.

    What it took and did not finish is read again at the store's cursors, as after a `kill -9`.
    """
    if app is not None:
        leave_group(app)
    os.execv(sys.executable, sys.orig_argv)


def declare_agent(app: faust.App, topic: str, folder: Folder, take: int, within_s: float) -> None:
    """Add the agent that folds a topic.

    `noack_take` with an ack after the store's reply is the only form in which Faust neither acknowledges what an
    agent dropped nor what it has not finished (streams/README.md); nothing may escape the body, for Faust would
    restart the agent behind the records that it held.
    """
    source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    def end(partition: int) -> int | None:
        return end_of(app, TP(topic, partition))

    async def fold_events(stream: Any) -> None:
        storing: asyncio.Task[None] | None = None
        try:
            async for events in stream.noack_take(take, within=within_s):
                with _nothing_escapes(app, topic):
                    parts = folder.read([_taken(event.message) for event in events], end)
                if storing is not None:
                    await storing
                # Redis works on these while Faust hands out the next ones
                storing = asyncio.create_task(store(stream, events, parts))
        finally:
            if storing is not None:
                storing.cancel()

    async def store(stream: Any, events: Sequence[Any], parts: Sequence[Part]) -> None:
        with _nothing_escapes(app, topic):
            await folder.store(parts)
            for event in events:
                await stream.ack(event)

    app.agent(source, name=f"fold {topic}", concurrency=1)(fold_events)


@contextmanager
def _nothing_escapes(app: faust.App, topic: str) -> Iterator[None]:
    """End the process, or begin anew, where folding failed."""
    try:
        yield
    except StaleIndex as error:
        log.critical("stream.index_lost", topic=topic, error=str(error))
        begin_again(app)
    except Exception:
        log.exception("stream.fold_failed", topic=topic)
        os._exit(BUG)


def _taken(message: Any) -> Taken:
    time_s = message.timestamp or 0.0  # none in Kafka's oldest formats
    return Taken(message.partition, message.offset, time_s, message.key, message.value or b"")
