"""The relay process: all ranks of one replica, one producer, one heartbeat."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from ops.settings import Settings
from relays.dialects import EngineSettings, profile_for
from relays.engine import EngineRank
from relays.publisher import Publisher
from relays.rank import RankRelay
from relays.registry import follow_control, last_life
from relays.sockets import EngineSocket
from relays.source import RankSource
from relays.trtllm_poller import EventPoller, PulledRank, events_url
from schemas.control import Resync
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.events import encode_record
from schemas.profiles import Holder, Profile, Rank, ReplicaEntry, encode_entry
from schemas.topics import REPLICAS, events_topic

log = structlog.get_logger()

_PAUSE_S = 1.0
_FLUSH_S = 5.0
_GATHER_S = 0.005  # after a record the next one waits for more changes to carry
_MAX_DELAY_S = 60.0  # of the answer to a request, whatever it says


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine a relay stands beside."""

    model: str
    replica: str
    engine: str
    version: str
    ranks: tuple[Rank, ...]
    topic: str = ""  # of the engine's publisher; empty takes all
    settings: EngineSettings = EngineSettings()


class Relay:
    """Mirrors a replica's ranks and tells the index what changed, for as long as `run` runs."""

    def __init__(self, config: RelayConfig, settings: Settings, client: Mapping[str, Any]) -> None:
        self._config = config
        self._settings = settings
        self._client = client
        self._profile = profile_of(config)
        self._key = config.replica.encode()
        self._topic = events_topic(config.model)
        self._life = 0
        self._changed = asyncio.Event()
        self._speaking = asyncio.Lock()  # a heartbeat must not overtake the record whose sequence it names
        self._certain = False  # these lives are above all earlier ones
        self._told_entry: ReplicaEntry | None = None
        self._publisher = Publisher(
            client,
            engine=config.engine,
            in_flight=settings.relay_records_in_flight,
            request_timeout_ms=settings.kafka_request_timeout_ms,
        )
        self._context = zmq.asyncio.Context()
        self._ranks: list[RankSource] = []

    @property
    def owed(self) -> int:
        """Records that Kafka has not acknowledged; what more there is to say waits in the mirrors as a difference."""
        return self._publisher.owed

    async def run(self) -> None:
        """Relay until cancelled; then stop reading, send what is owed and close."""
        # Kafka is not waited for: the engine's ring forgets
        sources = self._pulled() if self._profile.dialect == "trtllm" else self._published()
        log.info("relay.started", replica=self._config.replica, ranks=len(self._ranks), life=self._life)
        sending = asyncio.create_task(self._publisher.run())
        try:
            async with asyncio.TaskGroup() as tasks:
                for source in sources:
                    tasks.create_task(source.run())
                tasks.create_task(self._talk())
                tasks.create_task(_watch(sending))
        finally:
            await self._finish(sending)

    def _published(self) -> Sequence[RankRelay]:
        """Return what listens, a source for each rank."""
        ranks = [self._rank(rank) for rank in self._config.ranks]
        self._ranks = [*ranks]
        return ranks

    def _pulled(self) -> Sequence[EventPoller]:
        """Return what asks, one source for all ranks; more of them may come with their events."""

        def new_rank(number: int) -> PulledRank:
            rank = PulledRank(
                self._engine(number),
                next_life=self._next_life,
                on_change=self._changed.set,
                unknown_after_s=self._settings.relay_unknown_after_s,
            )
            self._ranks.append(rank)
            return rank

        poller = EventPoller(
            self._config.ranks[0].endpoint,
            [new_rank(rank.rank) for rank in self._config.ranks],
            new_rank,
            idle_s=self._settings.relay_idle_poll_s,
            timeout_s=self._settings.relay_poll_timeout_s,
        )
        return [poller]

    def _engine(self, rank: int) -> EngineRank:
        return EngineRank(
            self._profile,
            Holder(self._config.replica, rank),
            self._next_life(),
            secret=self._settings.secret.encode(),
        )

    def _rank(self, rank: Rank) -> RankRelay:
        return RankRelay(
            self._engine(rank.rank),
            EngineSocket(self._context, rank.endpoint, rank.replay_endpoint, self._config.topic),
            next_life=self._next_life,
            on_change=self._changed.set,
            probe_s=self._settings.relay_probe_s,
            replay_timeout_s=self._settings.relay_replay_timeout_s,
            unknown_after_s=self._settings.relay_unknown_after_s,
            buffer_messages=self._settings.relay_buffer_messages,
        )

    def _next_life(self) -> int:
        """Return a life above all that are known: the fold refuses lower ones, and so a second relay's."""
        self._life = max(self._life + 1, time.time_ns() // 1_000_000)
        return self._life

    async def _read_life(self) -> int:
        while True:
            try:
                return await last_life(self._client, self._config.replica)
            except BrokerUnavailable as error:
                log.warning("relay.broker_unavailable", error=str(error), pause_s=_PAUSE_S)
                await asyncio.sleep(_PAUSE_S)

    # ---- tasks

    async def _talk(self) -> None:
        """Speak, beat and listen, once it is certain that no earlier life is higher."""
        known = await self._read_life()
        if known >= min(rank.engine.voice.life for rank in self._ranks):
            self._life = max(self._life, known)
            for rank in self._ranks:
                rank.begin_life("clock_behind", keep=True)
        self._certain = True
        async with self._speaking:
            await self._tell_entry()  # an operator sees the relay before its engine says anything
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._speak())
            tasks.create_task(self._beat())
            tasks.create_task(self._listen())

    async def _speak(self) -> None:
        """Publish what is new, as soon as Kafka has room; until then the mirrors keep the difference."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._speak_once()
            await asyncio.sleep(_GATHER_S)

    async def _speak_once(self) -> None:
        """Publish what is new, a record of each rank in turn."""
        telling = list(self._ranks)
        while telling:
            for rank in list(telling):
                await self._publisher.wait_for_room()
                async with self._speaking:
                    record = rank.next_record()
                    if record is None:
                        telling.remove(rank)
                    else:
                        await self._publisher.put(self._topic, self._key, encode_record(record))
        async with self._speaking:
            await self._tell_entry()

    async def _tell_entry(self) -> None:
        """Keep `kv.replicas` at the newest profile and life."""
        entry = ReplicaEntry(max(rank.engine.voice.life for rank in self._ranks), self._ranks[0].engine.mirror.profile)
        if entry != self._told_entry:
            self._told_entry = entry
            await self._publisher.put(REPLICAS, self._key, encode_entry(entry))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._speaking:
                for rank in self._ranks if self._publisher.healthy else ():
                    await self._publisher.put(self._topic, self._key, encode_record(rank.beat(loop.time())))
            await asyncio.sleep(self._settings.relay_heartbeat_s)

    async def _listen(self) -> None:
        """Answer requests to tell everything again."""
        async with asyncio.TaskGroup() as answers:

            def on_resync(request: Resync) -> None:
                for rank in self._ranks:
                    if rank.engine.holder == Holder(request.name, request.rank):
                        answers.create_task(self._say_again(rank, request))

            while True:
                try:
                    await follow_control(self._client, on_resync)
                except BrokerUnavailable as error:
                    log.warning("relay.broker_unavailable", error=str(error), pause_s=_PAUSE_S)
                await asyncio.sleep(_PAUSE_S)

    async def _say_again(self, rank: RankSource, request: Resync) -> None:
        life = rank.engine.voice.life
        await asyncio.sleep(random.uniform(0, min(max(request.within_s, 0.0), _MAX_DELAY_S)))
        async with self._speaking:
            if rank.engine.voice.life == life:  # else another request, or a restart, was faster
                rank.begin_life(request.reason, keep=True)

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
        self._context.destroy(linger=0)
        received = {str(rank.engine.holder): rank.engine.received for rank in self._ranks}
        log.info("relay.stopped", replica=self._config.replica, received=received, owed=self._publisher.owed)


async def _watch(sending: "asyncio.Task[None]") -> None:
    """Fail with the task that sends; it outlives the others, to send what they leave."""
    await asyncio.shield(sending)


def profile_of(config: RelayConfig) -> Profile:
    """Return the profile that configuration and dialect table give.

    Raises:
        ConfigError: an engine that is not known here, or settings that it cannot have.
    """
    profile = profile_for(config.engine, config.model, config.replica, config.version, config.settings)
    pulled = profile.dialect == "trtllm"
    for rank in config.ranks:
        if is_http(rank.endpoint) != pulled:
            how = "transport=http asks an HTTP address" if pulled else "this engine's events come over ZMQ"
            raise ConfigError(f"endpoint: {rank.endpoint!r}; {how}")
        if pulled:
            events_url(rank.endpoint)
    return msgspec.structs.replace(profile, ranks=config.ranks)


def is_http(endpoint: str) -> bool:
    """Return whether events must be asked for there."""
    return endpoint.startswith(("http://", "https://"))


def spread_ranks(endpoint: str, replay_endpoint: str | None, count: int, *, first: int = 0) -> tuple[Rank, ...]:
    """Return one endpoint a rank: the port rises by one, for both sockets (engines/vllm-events.md 1.5).

    Over HTTP all ranks are asked for at once, at one address.
    """
    if count == 1:
        return (Rank(first, endpoint, replay_endpoint),)
    if is_http(endpoint):
        return tuple(Rank(first + n, endpoint) for n in range(count))
    return tuple(
        Rank(first + n, _offset(endpoint, n), None if replay_endpoint is None else _offset(replay_endpoint, n))
        for n in range(count)
    )


def _offset(endpoint: str, rank: int) -> str:
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"endpoint: {endpoint!r} has no port to count ranks from")
    return f"{address}:{int(port) + rank}"
