"""What would go wrong in silence, watched: a group that refuses us, a worker that is stuck, a topic made anew."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import faust
import structlog

from ops.metrics import STREAM_LAG
from schemas.errors import BrokerUnavailable
from streams.agents import begin_again
from streams.folding import Folder
from streams.transport import group_error, lags

log = structlog.get_logger()

REFUSED = 2
"""Exit code where settings and broker do not go together."""

_LAG_S = 5.0
_GROUP_S = 1.0


async def watch_group(app: faust.App, group: str) -> None:
    """End the process where Kafka does not let it into its group: Faust would wait for partitions without end."""
    while True:
        await asyncio.sleep(_GROUP_S)
        error = group_error(app)
        if error is not None:
            log.critical("stream.group_refused", group=group, error=str(error))
            os._exit(REFUSED)


async def watch_progress(app: faust.App, folders: Mapping[str, Folder], stuck_after_s: float) -> None:
    """Begin again where records wait and none is folded: stalls were seen in the field (faust #175, #629)."""
    stuck_s = 0.0
    folded = -1
    while True:
        await asyncio.sleep(_LAG_S)
        now = sum(folder.folded for folder in folders.values())
        waiting = sum(lags(app).values())
        stuck_s = stuck_s + _LAG_S if waiting and now == folded else 0.0
        folded = now
        if stuck_s >= stuck_after_s:
            log.critical("stream.worker_stuck", waiting=waiting, stuck_s=stuck_s)
            begin_again(app)


async def watch_topics(
    app: faust.App, folders: Mapping[str, Folder], topic_ids: Callable[[], Awaitable[dict[str, str]]]
) -> None:
    """Keep the lag told, and begin again where a topic is another one now: the consumer sees but its offsets."""
    while True:
        try:
            ids = await topic_ids()
        except BrokerUnavailable as error:
            log.warning("stream.broker_unavailable", error=str(error))
        else:
            for topic, folder in folders.items():
                if folder.topic_id and ids.get(topic) != folder.topic_id:
                    log.critical("stream.topic_made_anew", topic=topic, was=folder.topic_id, found=ids.get(topic))
                    begin_again(app)
        STREAM_LAG.clear()  # partitions that are another worker's now
        for tp, lag in lags(app).items():
            STREAM_LAG.labels(tp.topic, str(tp.partition)).set(lag)
        await asyncio.sleep(_LAG_S)
