"""The worker process: topics waited for, store set up, the Faust app run, and what must be looked after meanwhile."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import faust
import structlog
from aiokafka.errors import MessageSizeTooLargeError
from faust.types import TP

from index.redis_store import RedisStore
from ops.kafka_client import client_options
from ops.metrics import STREAM_LAG, STREAM_RESYNCS
from ops.settings import Settings, listed
from schemas.control import Resync, encode_control
from schemas.errors import BrokerUnavailable, ConfigError, StaleIndex, StoreUnavailable
from schemas.profiles import Holder
from schemas.topics import CONTROL, DEAD_LETTERS, REPLICAS, events_topic
from streams.agents import begin_again
from streams.app import build_app
from streams.folding import DeadLetter, Folder
from streams.topics import topic_ids, wait_for_topics
from streams.transport import group_error
from streams.unread import Unread

log = structlog.get_logger()

_PAUSE_S = 0.5
_ASK_AGAIN_S = 10.0
_LAG_S = 5.0
_UNREAD_S = 1.0
_GROUP_S = 1.0
REFUSED = 2
"""Exit code where settings and broker do not go together."""

_CUT_BYTES = 500_000  # of a dead letter that Kafka refuses whole
_STOP_S = 8.0  # supervisors kill after 10 s or more


class Worker:
    """Folds the configured models' events into Redis until told to stop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models = listed(settings.models)
        if not self._models:
            raise ConfigError("models: a worker needs the names of the models that it folds (KVATLAS_MODELS)")
        self._topics = {events_topic(model): model for model in self._models}
        self._store = RedisStore.from_urls(
            listed(settings.redis_url), settings.shards, timeout_s=settings.redis_timeout_s
        )
        self._folders = {
            topic: Folder(model, topic, self._store, self._set_aside, self._ask_again)
            for topic, model in self._topics.items()
        }
        self._unread = {topic: Unread(model, self._ask_again) for topic, model in self._topics.items()}
        self._asked_s: dict[tuple[str, Holder], float] = {}
        self._app: faust.App | None = None
        self._started = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> int:
        """Return the exit code once stopped: finished batches are folded and committed by then."""
        stopping = asyncio.create_task(stop.wait())
        preparing = asyncio.create_task(self._prepare())
        await asyncio.wait((stopping, preparing), return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            await self._store.close()
            return 0
        preparing.result()
        app = self._app = build_app(self._settings, self._folders, self._load_cursors, self._on_range, self._on_back)
        app.finalize()
        tasks = [
            stopping,
            asyncio.create_task(self._serve(app)),
            asyncio.create_task(self._watch_group(app)),
            *(asyncio.create_task(self._once_started(app, task)) for task in (self._tend, self._ask_unread)),
            *(asyncio.create_task(self._once_started(app, task)) for task in (self._watch, self._watch_topics)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop(app)
        if app.crashed:
            log.error("stream.worker_crashed", error=str(app.crash_reason))
            return 1
        log.info("stream.worker_stopped")
        return 0

    async def _prepare(self) -> None:
        """Wait for the topics and for Redis."""
        settings = self._settings
        await wait_for_topics(
            settings.kafka_brokers, [*self._topics, REPLICAS, CONTROL, DEAD_LETTERS], log, settings.security
        )
        for model in self._models:
            await self._until_available(partial(self._store.setup, model))

    async def _serve(self, app: faust.App) -> None:
        await app.start()
        log.info("stream.worker_started", models=self._models, group=self._settings.worker_group)
        self._started.set()
        await app.wait_until_stopped()

    async def _once_started(self, app: faust.App, task: Callable[[faust.App], Awaitable[None]]) -> None:
        await self._started.wait()
        await task(app)

    async def _stop(self, app: faust.App) -> None:
        """Finish the batches at hand and commit; what Redis does not take in time is read again by the next worker."""
        stopping = asyncio.create_task(app.stop())
        _, unfinished = await asyncio.wait({stopping}, timeout=_STOP_S)
        if unfinished:
            log.warning("stream.batches_left", reason="not finished in time", timeout_s=_STOP_S)
            os._exit(0)  # Faust waits for them without end, and swallows a cancellation
        stopping.result()
        await self._store.close()

    # ---- starting where the store stands

    async def _load_cursors(self, partitions: set[TP]) -> dict[TP, int]:
        """Return where to read on; a topic that was made anew has another id, and so no cursor."""
        ids = await self._until_available(self._topic_ids)
        cursors: dict[TP, int] = {}
        for topic, model in self._topics.items():
            if not any(tp.topic == topic for tp in partitions):
                continue
            if topic not in ids:
                log.critical("stream.topic_gone", topic=topic)
                begin_again(self._app)
            self._folders[topic].topic_id = ids[topic]
            # another worker may have written since: its slots are read again with the cursors
            await self._until_available(partial(self._store.setup, model))
            known = await self._until_available(partial(self._store.cursors, model))
            for tp in partitions:
                if tp.topic == topic and (ids[topic], tp.partition) in known:
                    cursors[tp] = known[ids[topic], tp.partition]
                elif tp.topic == topic and any(partition == tp.partition for _, partition in known):
                    log.error("stream.topic_made_anew", topic=topic, partition=tp.partition, id=ids[topic])
                    self._unread[topic].add(tp.partition)  # what stood in the old one behind its cursor
        log.info(
            "stream.partitions_assigned",
            partitions={f"{tp.topic}/{tp.partition}": cursors.get(tp, "first") for tp in sorted(partitions)},
        )
        return cursors

    def _on_range(self, tp: TP, cursor: int | None, first: int, end: int) -> None:
        """Records are gone unread: their holders are asked to tell everything again."""
        log.error("stream.records_unread", topic=tp.topic, partition=tp.partition, cursor=cursor, first=first, end=end)
        self._unread[tp.topic].add(tp.partition)

    def _on_back(self, tp: TP, offset: int, expected: int) -> None:
        """A log that went back: the topic was deleted and made anew."""
        log.critical("stream.log_went_back", topic=tp.topic, partition=tp.partition, offset=offset, expected=expected)
        begin_again(self._app)

    async def _topic_ids(self) -> dict[str, str]:
        return await topic_ids(self._settings.kafka_brokers, self._topics, self._settings.security)

    # ---- what the folders need

    async def _set_aside(self, letter: DeadLetter) -> None:
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

    async def _ask_again(self, model: str, holder: Holder) -> None:
        """Ask a holder's relay to tell everything again, not more often than it can answer."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s.get((model, holder), -_ASK_AGAIN_S) < _ASK_AGAIN_S:
            return
        self._asked_s[model, holder] = now_s
        STREAM_RESYNCS.labels("records_lost").inc()
        log.warning("stream.resync_asked", model=model, holder=str(holder))
        request = Resync(holder.name, holder.rank, "records_lost")
        await self._send(CONTROL, holder.name.encode(), encode_control(request), {})

    async def _send(self, topic: str, key: bytes, value: bytes, headers: dict[str, bytes]) -> bool:
        """Return once Kafka has it, however long that takes; False where it is too large, which no waiting cures."""
        pause_s = _PAUSE_S
        while True:
            try:
                assert self._app is not None  # folders run inside the app only
                await (await self._app.send(topic, key=key, value=value, headers=headers))
            except Exception as error:  # whatever the producer raises, the record must not be passed over
                if isinstance(error.__cause__ or error, MessageSizeTooLargeError):
                    log.warning("stream.send_refused", topic=topic, error=str(error))
                    return False
                log.warning("stream.send_failed", topic=topic, error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 10.0)
            else:
                return True

    # ---- meanwhile

    async def _tend(self, app: faust.App) -> None:
        """Ask again for holders that stay broken, and let go of what dead slots hold."""
        swept_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(_ASK_AGAIN_S * random.uniform(0.8, 1.2))
            now_s = asyncio.get_running_loop().time()
            for model in self._models:
                try:
                    for row in await self._store.holders(model):
                        if row.broken:
                            await self._ask_again(model, row.holder)
                    if now_s - swept_s > self._settings.worker_sweep_s:
                        freed = await self._store.sweep(model)
                        if freed:
                            log.info("stream.slots_swept", model=model, slots=freed)
                except StaleIndex as error:
                    log.critical("stream.index_lost", model=model, error=str(error))
                    begin_again(self._app)
                except StoreUnavailable as error:
                    log.warning("stream.store_unavailable", model=model, error=str(error))
            if now_s - swept_s > self._settings.worker_sweep_s:
                swept_s = now_s

    async def _ask_unread(self, app: faust.App) -> None:
        """Ask holders whose records were lost unseen, until they have told again."""
        client = client_options(self._settings.kafka_brokers, self._settings.security)
        while True:
            for topic, unread in self._unread.items():
                if unread.pending:
                    try:
                        rows = await self._store.holders(self._topics[topic])
                        await unread.ask(client, app.consumer.topic_partitions(topic) or 1, rows)
                    except (StaleIndex, StoreUnavailable, BrokerUnavailable) as error:
                        log.warning("stream.unread_not_asked", topic=topic, error=str(error))
            waiting = any(unread.pending for unread in self._unread.values())
            await asyncio.sleep(_ASK_AGAIN_S if waiting else _UNREAD_S)

    async def _check_topics(self) -> None:
        """Begin again where a topic was made anew, which the consumer may not notice: offsets are just numbers."""
        try:
            ids = await self._topic_ids()
        except BrokerUnavailable as error:
            log.warning("stream.broker_unavailable", error=str(error))
            return
        for topic, folder in self._folders.items():
            if folder.topic_id and ids.get(topic) != folder.topic_id:
                log.critical("stream.topic_made_anew", topic=topic, was=folder.topic_id, found=ids.get(topic, "none"))
                begin_again(self._app)

    async def _watch_group(self, app: faust.App) -> None:
        """End where Kafka does not let this worker into its group: Faust would wait for partitions without end."""
        while True:
            await asyncio.sleep(_GROUP_S)
            error = group_error(app)
            if error is not None:
                log.critical("stream.group_refused", group=self._settings.worker_group, error=str(error))
                os._exit(REFUSED)

    async def _watch(self, app: faust.App) -> None:
        """Begin again where records wait and none is folded: Faust stalls were seen in the field (faust #175, #629)."""
        stuck_s = 0.0
        folded = -1
        while True:
            await asyncio.sleep(_LAG_S)
            now = sum(folder.folded for folder in self._folders.values())
            waiting = sum(_lag(app).values())
            stuck_s = stuck_s + _LAG_S if waiting and now == folded else 0.0
            folded = now
            if stuck_s >= self._settings.worker_stuck_after_s:
                log.critical("stream.worker_stuck", waiting=waiting, stuck_s=stuck_s)
                begin_again(self._app)

    async def _watch_topics(self, app: faust.App) -> None:
        """Keep the lag told, and begin again where a topic is another one now."""
        while True:
            await self._check_topics()
            STREAM_LAG.clear()  # partitions that are another worker's now
            for tp, lag in _lag(app).items():
                STREAM_LAG.labels(tp.topic, str(tp.partition)).set(lag)
            await asyncio.sleep(_LAG_S)

    async def _until_available(self, call: Callable[[], Awaitable[Any]]) -> Any:
        pause_s = _PAUSE_S
        while True:
            try:
                return await call()
            except (StoreUnavailable, BrokerUnavailable) as error:
                log.warning("stream.service_unavailable", error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)


def _lag(app: faust.App) -> dict[TP, int]:
    """Return for each assigned partition how many records wait, as far as the consumer has heard."""
    lags: dict[TP, int] = {}
    partitions: Sequence[TP] = list(app.consumer.assignment())
    for tp in partitions:
        end, read = app.consumer.highwater(tp), app.consumer._read_offset[tp]
        if end is not None and read is not None:
            lags[tp] = max(0, end - read - 1)
    return lags
