"""The worker process: topics waited for, store set up, the Faust app run, and broken holders and dead slots tended."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import faust
import structlog
from faust.types import TP

from index.redis_store import RedisStore
from index.store import REBUILDING, HolderRow
from ops.kafka_client import client_options
from ops.pauses import Pauses
from ops.registry import read_entries
from ops.settings import Settings, listed
from schemas.errors import BrokerUnavailable, ConfigError, StaleIndex, StoreUnavailable
from schemas.topics import CONTROL, DEAD_LETTERS, REPLICAS, events_topic
from streams.agents import begin_again
from streams.app import build_app
from streams.folding import Folder
from streams.outbox import ASK_AGAIN_S, Outbox
from streams.topics import topic_ids, wait_for_topics
from streams.watches import watch_group, watch_progress, watch_topics

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
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
        self._outbox = Outbox()
        self._folders = {
            topic: Folder(model, topic, self._store, self._outbox.set_aside, self._outbox.ask_again)
            for topic, model in self._topics.items()
        }

    async def run(self, stop: asyncio.Event) -> int:
        """Return the exit code once stopped: finished batches are folded and committed by then."""
        await _first_of(stop.wait(), self._prepare())
        if stop.is_set():
            await self._store.close()
            return 0
        app = self._outbox.app = build_app(
            self._settings, self._folders, self._load_cursors, self._on_range, self._on_back
        )
        app.finalize()
        try:
            await _first_of(stop.wait(), self._serve(app), watch_group(app, self._settings.worker_group))
        finally:
            await self._stop(app)
        if app.crashed:
            log.error("stream.worker_crashed", error=str(app.crash_reason))
            return 1
        log.info("stream.worker_stopped")
        return 0

    async def _prepare(self) -> None:
        """Wait for the topics and for Redis; where the index is empty it learns who is expected to speak."""
        settings = self._settings
        await wait_for_topics(
            settings.kafka_brokers, [*self._topics, REPLICAS, CONTROL, DEAD_LETTERS], log, settings.security
        )
        client = client_options(settings.kafka_brokers, settings.security)
        entries = await _until_available(partial(read_entries, client))
        for model in self._models:
            profiles = [entry.profile for entry in entries.values() if entry.profile.model == model]
            expected = {holder: profile for profile in profiles for holder in profile.holders}
            if await _until_available(partial(self._store.setup, model, expected)):
                log.warning("stream.index_empty", model=model, expected=sorted(map(str, expected)))

    async def _serve(self, app: faust.App) -> None:
        await app.start()
        log.info("stream.worker_started", models=self._models, group=self._settings.worker_group)
        await _first_of(
            app.wait_until_stopped(),
            self._tend(app),
            watch_progress(app, self._folders, self._settings.worker_stuck_after_s),
            watch_topics(app, self._folders, self._topic_ids),
        )

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
        ids = await _until_available(self._topic_ids)
        cursors: dict[TP, int] = {}
        for topic in {tp.topic for tp in partitions}:
            if topic not in ids:
                log.critical("stream.topic_gone", topic=topic)
                begin_again(self._outbox.app)
            self._folders[topic].topic_id = ids[topic]
            for partition, offset in (await self._cursors(topic, ids[topic])).items():
                if TP(topic, partition) in partitions:
                    cursors[TP(topic, partition)] = offset
        log.info(
            "stream.partitions_assigned",
            partitions={f"{tp.topic}/{tp.partition}": cursors.get(tp, "first") for tp in sorted(partitions)},
        )
        return cursors

    async def _cursors(self, topic: str, topic_id: str) -> dict[int, int]:
        """Return partition -> next offset to read, and read again which slots other workers gave out meanwhile."""
        model = self._topics[topic]
        try:
            await _until_available(partial(self._store.reload, model))
            known = await _until_available(partial(self._store.cursors, model))
        except StaleIndex as error:
            log.critical("stream.index_lost", model=model, error=str(error))
            begin_again(self._outbox.app)
        cursors = {partition: offset for (its_id, partition), offset in known.items() if its_id == topic_id}
        lost = sorted({partition for _, partition in known} - cursors.keys())
        if lost:
            log.error("stream.topic_made_anew", topic=topic, id=topic_id, partitions=lost)
        return cursors

    def _on_range(self, tp: TP, cursor: int | None, first: int, end: int) -> None:
        """Records are gone unread; what they said shows as a gap, in the next ones or in a heartbeat."""
        log.error("stream.records_unread", topic=tp.topic, partition=tp.partition, cursor=cursor, first=first, end=end)

    def _on_back(self, tp: TP, offset: int, expected: int) -> None:
        """A log that went back: the topic was deleted and made anew."""
        log.critical("stream.log_went_back", topic=tp.topic, partition=tp.partition, offset=offset, expected=expected)
        begin_again(self._outbox.app)

    async def _topic_ids(self) -> dict[str, str]:
        return await topic_ids(self._settings.kafka_brokers, self._topics, self._settings.security)

    # ---- meanwhile

    async def _tend(self, app: faust.App) -> None:
        """Ask again for holders that stay broken, and let go of what dead slots hold."""
        clock_s = asyncio.get_running_loop().time
        sweep_at_s = clock_s() + self._settings.worker_sweep_s
        while True:
            await asyncio.sleep(ASK_AGAIN_S * random.uniform(0.8, 1.2))
            sweep = clock_s() >= sweep_at_s
            if sweep:
                sweep_at_s = clock_s() + self._settings.worker_sweep_s
            for model in self._models:
                try:
                    await self._ask_broken(model)
                    if sweep and (freed := await self._store.sweep(model)):
                        log.info("stream.slots_swept", model=model, slots=freed)
                except StaleIndex as error:
                    log.critical("stream.index_lost", model=model, error=str(error))
                    begin_again(app)
                except StoreUnavailable as error:
                    log.warning("stream.store_unavailable", model=model, error=str(error))

    async def _ask_broken(self, model: str) -> None:
        """Ask who lost records, or whose profile is not in the log any more."""
        for row in await self._store.holders(model):
            if (row.broken or row.profile is None) and self._may_answer(row):
                await self._outbox.ask_again(model, row.holder)

    def _may_answer(self, row: HolderRow) -> bool:
        """Return whether its relay speaks, and its answer would not lie behind what is still to be read."""
        speaks = row.age_s is not None and row.age_s < self._settings.unknown_after_s
        return speaks and row.reason != REBUILDING


async def _first_of(*bodies: Awaitable[object]) -> None:
    """Run all until one of them is done or fails, and cancel the others."""
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_available(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a call returns, however long its service is away."""
    pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            return await call()
        except (StoreUnavailable, BrokerUnavailable) as error:
            pause_s = pauses.next_s()
            log.warning("stream.service_unavailable", error=str(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
