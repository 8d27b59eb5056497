"""What every relay process tells Kafka of its holders: records, heartbeats and entries of the registry."""

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import structlog

from ops.registry import read_entries
from ops.settings import Settings
from relays.control import follow_control
from relays.publisher import Publisher
from relays.source import Owner
from schemas.control import Resync
from schemas.errors import BrokerUnavailable
from schemas.events import BlockEvent, Heartbeat, Record, encode_record
from schemas.profiles import Holder, Profile, ReplicaEntry, encode_entry
from schemas.topics import REPLICAS, events_topic

log = structlog.get_logger()

_PAUSE_S = 1.0
_FLUSH_S = 5.0
_GATHER_S = 0.02  # after a record the next one waits for more changes to carry: a worker's cost is one a record
_MAX_DELAY_S = 60.0  # of the answer to a request, whatever it says


class Speaker(Protocol):
    """One holder, as far as telling goes."""

    @property
    def holder(self) -> Holder:
        """Return whose records these are."""

    @property
    def entry_key(self) -> str:
        """Return the key of its entry in `kv.replicas`; the ranks of a replica share one."""

    @property
    def profile(self) -> Profile:
        """Return what is known of it beside its blocks."""

    @property
    def life(self) -> int:
        """Return the life that it speaks in."""

    def next_record(self) -> Record | None:
        """Return the next record that tells the index what is new, or None where it has been told all for now."""

    def beat(self, now_s: float) -> Record:
        """Return a heartbeat that says how far its source is believed."""

    def begin_life(self, reason: str, *, keep: bool) -> None:
        """Say everything again in a higher life; `keep`: what is known stays known."""


class Teller:
    """Speaks for the holders of one process, with one producer; they may become more while it runs."""

    def __init__(self, settings: Settings, client: Mapping[str, Any], *, engine: str) -> None:
        self.speakers: list[Speaker] = []
        self.changed = asyncio.Event()
        self._settings = settings
        self._client = client
        self._life = 0
        self._speaking = asyncio.Lock()  # a heartbeat must not overtake the record whose sequence it names
        self._certain = False  # these lives are above all earlier ones
        self._told: dict[str, ReplicaEntry] = {}
        self._begun: set[tuple[str, Holder]] = set()  # whose life is being told from its beginning
        self._publisher = Publisher(
            client,
            engine=engine,
            in_flight=settings.relay_records_in_flight,
            request_timeout_ms=settings.kafka_request_timeout_ms,
        )

    @property
    def owed(self) -> int:
        """Records that Kafka has not acknowledged; what more there is to say waits in the mirrors as a difference."""
        return self._publisher.owed

    @property
    def owner(self) -> Owner:
        """What this process gives each source whose holder it speaks for."""
        return Owner(self.next_life, self.changed.set, self._settings.relay_unknown_after_s)

    def next_life(self) -> int:
        """Return a life above all that are known: the fold refuses lower ones, and so a second relay's."""
        self._life = max(self._life + 1, time.time_ns() // 1_000_000)
        return self._life

    async def run(self, sources: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Let the sources receive and tell what they learn, until cancelled; then send what is owed and close.

        Sources do not wait for Kafka: the engines' rings forget.
        """
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.TaskGroup() as tasks:
                for source in sources:
                    tasks.create_task(source)
                tasks.create_task(_watch(telling))
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell(self) -> None:
        sending = asyncio.create_task(self._publisher.run())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._talk())
                tasks.create_task(_watch(sending))
        finally:
            await self._finish(sending)

    # ---- tasks

    async def _talk(self) -> None:
        """Speak, beat and listen, once it is certain that no earlier life is higher."""
        known = await self._read_life()
        if known >= min((speaker.life for speaker in self.speakers), default=known + 1):
            self._life = max(self._life, known)
            for speaker in self.speakers:
                speaker.begin_life("clock_behind", keep=True)
        self._certain = True
        async with self._speaking:
            await self._tell_entries()  # an operator sees the relay before its engine says anything
        self.changed.set()  # and the index the profile
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._speak())
            tasks.create_task(self._beat())
            tasks.create_task(self._listen())

    async def _read_life(self) -> int:
        """Return the highest life that these holders have had."""
        while True:
            try:
                entries = await read_entries(self._client)
                keys = {speaker.entry_key for speaker in self.speakers}
                return max((entry.life for key, entry in entries.items() if key in keys), default=0)
            except BrokerUnavailable as error:
                log.warning("relay.broker_unavailable", error=str(error), pause_s=_PAUSE_S)
                await asyncio.sleep(_PAUSE_S)

    async def _speak(self) -> None:
        """Publish what is new, as soon as Kafka has room; until then the mirrors keep the difference."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            await self._speak_once()
            await asyncio.sleep(_GATHER_S)

    async def _speak_once(self) -> None:
        """Publish what is new, a record of each holder in turn."""
        telling = list(self.speakers)
        while telling:
            for speaker in list(telling):
                await self._publisher.wait_for_room()
                async with self._speaking:
                    record = speaker.next_record()
                    if record is None:
                        telling.remove(speaker)
                        self._begun.discard(_key(speaker))
                    else:
                        await self._put(speaker, record)
                        if record.sequence == 1:
                            self._begun.add(_key(speaker))
                        if record.engine_sequence:  # all is told, up to there
                            self._begun.discard(_key(speaker))
        async with self._speaking:
            await self._tell_entries()

    async def _put(self, speaker: Speaker, record: Record) -> None:
        topic = events_topic(speaker.profile.model)
        await self._publisher.put(topic, speaker.holder.name.encode(), encode_record(record))

    async def _tell_entries(self) -> None:
        """Keep `kv.replicas` at the newest profiles and lives."""
        entries: dict[str, ReplicaEntry] = {}
        for speaker in self.speakers:
            earlier = entries.get(speaker.entry_key)
            if earlier is None:
                entries[speaker.entry_key] = ReplicaEntry(speaker.life, speaker.profile)
            else:
                entries[speaker.entry_key] = ReplicaEntry(max(earlier.life, speaker.life), earlier.profile)
        for key, entry in entries.items():
            if entry != self._told.get(key):
                self._told[key] = entry
                await self._publisher.put(REPLICAS, key.encode(), encode_entry(entry))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._speaking:
                for speaker in self.speakers if self._publisher.healthy else ():
                    beat = speaker.beat(loop.time())
                    await self._put(speaker, _in_part(beat) if _key(speaker) in self._begun else beat)
            await asyncio.sleep(self._settings.relay_heartbeat_s)

    async def _listen(self) -> None:
        """Answer requests to tell everything again."""
        async with asyncio.TaskGroup() as answers:

            def on_resync(request: Resync) -> None:
                for speaker in self.speakers:
                    if speaker.holder == Holder(request.name, request.rank):
                        answers.create_task(self._say_again(speaker, request))

            while True:
                try:
                    await follow_control(self._client, on_resync)
                except BrokerUnavailable as error:
                    log.warning("relay.broker_unavailable", error=str(error), pause_s=_PAUSE_S)
                await asyncio.sleep(_PAUSE_S)

    async def _say_again(self, speaker: Speaker, request: Resync) -> None:
        life = speaker.life
        await asyncio.sleep(random.uniform(0, min(max(request.within_s, 0.0), _MAX_DELAY_S)))
        async with self._speaking:
            if speaker.life == life:  # else another request, or a restart, was faster
                speaker.begin_life(request.reason, keep=True)

    async def _finish(self, sending: "asyncio.Task[None]") -> None:
        """Send what is owed, if Kafka takes it, and close."""
        if self._certain and self._publisher.healthy:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._speak_once()
                    await self._publisher.flush(_FLUSH_S)
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending


def _key(speaker: Speaker) -> tuple[str, Holder]:
    return speaker.profile.model, speaker.holder


def _in_part(beat: Record) -> Record:
    """Return a heartbeat of a life that the index has been told but the beginning of."""
    events = (
        msgspec.structs.replace(event, state="catching_up") if _is_live(event) else event for event in beat.events
    )
    return msgspec.structs.replace(beat, events=tuple(events))


def _is_live(event: BlockEvent) -> bool:
    return isinstance(event, Heartbeat) and event.state == "live"


async def _watch(task: "asyncio.Task[None]") -> None:
    """Fail with a task that outlives the others, to send what they leave."""
    await asyncio.shield(task)
