"""The worker process: topics waited for, store set up, the Faust app run, and what must be looked after meanwhile."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import faust
import structlog
from faust.types import TP

from index.redis_store import RedisStore
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

log = structlog.get_logger()

_PAUSE_S = 0.5
_ASK_AGAIN_S = 10.0
_LAG_S = 5.0
_STOP_S = 10.0


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
        self._asked_s: dict[tuple[str, Holder], float] = {}
        self._app: faust.App | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Return the exit code once stopped: finished batches are folded and committed by then."""
        settings = self._settings
        await wait_for_topics(
            settings.kafka_brokers, [*self._topics, REPLICAS, CONTROL, DEAD_LETTERS], log, settings.security
        )
        for model in self._models:
            await self._until_available(partial(self._store.setup, model))
        app = self._app = build_app(settings, self._folders, self._load_cursors, self._on_range, self._on_back)
        app.finalize()
        await app.start()
        log.info("stream.worker_started", models=self._models, group=settings.worker_group)
        tasks = [
            asyncio.create_task(task)
            for task in (stop.wait(), app.wait_until_stopped(), self._tend(), self._watch(app), self._watch_lag(app))
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

    async def _stop(self, app: faust.App) -> None:
        """Finish the batches at hand and commit; what Redis does not take in time is read again by the next worker."""
        try:
            async with asyncio.timeout(_STOP_S):
                await app.stop()
        except TimeoutError:
            log.warning("stream.batches_left", reason="not finished in time", timeout_s=_STOP_S)
            os._exit(0)  # Faust would wait for them without end
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
                begin_again()
            self._folders[topic].topic_id = ids[topic]
            # another worker may have written since: its slots are read again with the cursors
            await self._until_available(partial(self._store.setup, model))
            known = await self._until_available(partial(self._store.cursors, model))
            cursors |= {
                tp: known[ids[topic], tp.partition]
                for tp in partitions
                if tp.topic == topic and (ids[topic], tp.partition) in known
            }
        log.info(
            "stream.partitions_assigned",
            partitions={f"{tp.topic}/{tp.partition}": cursors.get(tp, "first") for tp in sorted(partitions)},
        )
        return cursors

    def _on_range(self, tp: TP, cursor: int, first: int, end: int) -> None:
        """A cursor outside the log: what was lost shows as gaps, whose holders are asked to tell everything again."""
        log.error(
            "stream.cursor_out_of_range", topic=tp.topic, partition=tp.partition, cursor=cursor, first=first, end=end
        )

    def _on_back(self, tp: TP, offset: int, expected: int) -> None:
        """A log that went back: the topic was deleted and made anew."""
        log.critical("stream.log_went_back", topic=tp.topic, partition=tp.partition, offset=offset, expected=expected)
        begin_again()

    async def _topic_ids(self) -> dict[str, str]:
        return await topic_ids(self._settings.kafka_brokers, self._topics, self._settings.security)

    # ---- what the folders need

    async def _set_aside(self, letter: DeadLetter) -> None:
        """Write a record to the dead letters; returns once Kafka has it."""
        record = letter.record
        headers = {
            "topic": letter.topic.encode(),
            "partition": str(record.partition).encode(),
            "offset": str(record.offset).encode(),
            "reason": letter.reason.encode(),
            "detail": letter.detail.encode(),
        }
        await self._send(DEAD_LETTERS, f"{letter.topic}/{record.partition}".encode(), record.value, headers)

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

    async def _send(self, topic: str, key: bytes, value: bytes, headers: dict[str, bytes]) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                assert self._app is not None  # folders run inside the app only
                await (await self._app.send(topic, key=key, value=value, headers=headers))
            except Exception as error:  # whatever the producer raises, the record must not be passed over
                log.warning("stream.send_failed", topic=topic, error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 10.0)
            else:
                return

    # ---- meanwhile

    async def _tend(self) -> None:
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
                    begin_again()
                except StoreUnavailable as error:
                    log.warning("stream.store_unavailable", model=model, error=str(error))
            await self._check_topics()
            if now_s - swept_s > self._settings.worker_sweep_s:
                swept_s = now_s

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
                begin_again()

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
                begin_again()

    async def _watch_lag(self, app: faust.App) -> None:
        while True:
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
