"""The agents: one for each model's event topic, thin; what they do with records is in folding.py."""

import os
import sys
from typing import Any, NoReturn

import faust
import structlog

from schemas.errors import StaleIndex
from streams.folding import Folder, Taken

log = structlog.get_logger()

BUG = 70  # EX_SOFTWARE


def begin_again() -> NoReturn:
    """Put a new process in this one's place, with its pid and its arguments: all that it believed is void.

    What it took and did not finish is read again at the store's cursors, as after a `kill -9`.
    """
    os.execv(sys.executable, sys.orig_argv)


def declare_agent(app: faust.App, topic: str, folder: Folder, take: int, within_s: float) -> None:
    """Add the agent that folds a topic.

    `noack_take` with an ack after the store's reply is the only form in which Faust neither acknowledges what an
    agent dropped nor what it has not finished (streams/README.md); nothing may escape the body, for Faust would
    restart the agent behind the records that it held.
    """
    source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    async def fold_events(stream: Any) -> None:
        async for events in stream.noack_take(take, within=within_s):
            try:
                await folder.fold([_taken(event.message) for event in events])
            except StaleIndex as error:
                log.critical("stream.index_lost", topic=topic, error=str(error))
                begin_again()
            except Exception:
                log.exception("stream.fold_failed", topic=topic)
                os._exit(BUG)
            for event in events:
                await stream.ack(event)

    app.agent(source, name=f"fold {topic}", concurrency=1)(fold_events)


def _taken(message: Any) -> Taken:
    return Taken(message.partition, message.offset, message.key, message.value or b"")
