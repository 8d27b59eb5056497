"""The relay process of one pool: its publishers, the replicas that name its blocks, and one holder a model."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from ops.metrics import RELAY_MESSAGES, RELAY_REJECTS
from ops.settings import Settings
from relays.dialects import PoolSettings
from relays.engine_events import Decoded, Reject
from relays.follower import Follower
from relays.lmcache_stream import KvEventStream, target_of
from relays.mirror import Limits
from relays.pool import PoolModel
from relays.pool_source import Origin, PoolSource
from relays.sockets import EngineSocket
from relays.stores import KeyPattern, StoreMessage, decode_llmd, decode_mooncake
from relays.teller import Teller
from schemas.errors import ConfigError, FrameError
from schemas.events import MAX_NUMBER, Record
from schemas.profiles import Profile

log = structlog.get_logger()

KINDS = ("lmcache", "llmd", "mooncake")
_MESSAGE_PARTS = 3


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which pool a relay stands beside."""

    kind: str  # one of KINDS
    name: str  # by which replicas say that they read it
    models: tuple[str, ...]
    endpoints: tuple[str, ...]  # of its publishers; `grpc://host:port` for LMCache's server
    settings: PoolSettings


class PoolRelay:
    """Mirrors a pool and tells the index what changed, for as long as `run` runs."""

    def __init__(self, config: PoolConfig, settings: Settings, client: Mapping[str, Any]) -> None:
        _check(config)
        self._config = config
        self._unknown_after_s = settings.relay_unknown_after_s
        self._client = client
        self._teller = Teller(settings, client, engine=config.kind)
        self._context = zmq.asyncio.Context()
        self._origins = [Origin(str(number)) for number in range(len(config.endpoints))]
        self._doubt_s = config.settings.max_age_s / 2  # what ages twice as fast is gone by then
        self._decode = _decoder(config)
        self._sources = {model: self._source(model, settings) for model in config.models}
        self._names = {name: model for name, model in config.settings.models.items() if model in self._sources}
        self._log = log.bind(pool=config.name)

    async def run(self) -> None:
        """Relay until cancelled; then stop reading, send what is owed and close."""
        self._log.info("relay.started", kind=self._config.kind, models=list(self._sources))
        now_s = asyncio.get_running_loop().time()
        for origin in self._origins:
            origin.lost_s = now_s
        try:
            await self._teller.run(self._listeners())
        finally:
            self._context.destroy(linger=0)
            self._log.info("relay.stopped", owed=self._teller.owed)

    def _source(self, model: str, settings: Settings) -> PoolSource:
        config = self._config
        pool = PoolModel(
            model,
            config.name,
            config.kind,
            config.settings,
            self._teller.next_life(),
            Limits(),
            secret=settings.secret.encode(),
        )
        source = PoolSource(
            pool,
            self._origins,
            next_life=self._teller.next_life,
            on_change=self._teller.changed.set,
            unknown_after_s=self._unknown_after_s,
        )
        self._teller.speakers.append(source)
        return source

    def _listeners(self) -> list[Coroutine[Any, Any, None]]:
        if self._config.kind == "lmcache":
            return [
                self._stream(endpoint, origin, source).run()
                for endpoint, origin in zip(self._config.endpoints, self._origins, strict=True)
                for source in self._sources.values()
            ]
        follower = Follower(self._client, self._config.models, on_profile=self._on_profile, on_record=self._on_record)
        subscriptions = [
            self._subscription(EngineSocket(self._context, endpoint, None, ""), origin)
            for endpoint, origin in zip(self._config.endpoints, self._origins, strict=True)
        ]
        return [follower.run(), *subscriptions]

    # ---- stores that publish: names without tokens

    def _subscription(self, socket: EngineSocket, origin: Origin) -> Coroutine[Any, Any, None]:
        def on_message(frames: Sequence[bytes]) -> None:
            self._on_message(frames, origin)

        def on_connection(connected: bool) -> None:
            self._on_connection(origin, connected)

        return socket.receive(on_message, on_connection)

    def _on_message(self, frames: Sequence[bytes], origin: Origin) -> None:
        if len(frames) != _MESSAGE_PARTS or len(frames[1]) != 8:
            self._refuse("frame_count", f"{len(frames)} frames")
            return
        sequence = int.from_bytes(frames[1], "big")
        if sequence > MAX_NUMBER:
            self._refuse("sequence", str(sequence))
            return
        RELAY_MESSAGES.labels(self._config.kind, "published").inc()
        self._judge(origin, sequence)
        try:
            message = self._decode(frames[0], frames[2])
        except FrameError as error:
            self._refuse(error.reason, error.detail)
            return
        self._report(sequence, message.rejects)
        now_s = asyncio.get_running_loop().time()
        for name, events in message.events.items():
            source = self._model_of(name)
            if source is None:
                RELAY_REJECTS.labels(self._config.kind, "model_unknown").inc(len(events))
            else:
                source.take(events, origin, sequence, message.time_s, now_s)
        for source in self._sources.values():
            source.pool.received[origin.label] = sequence  # the counter runs over all models

    def _judge(self, origin: Origin, sequence: int) -> None:
        """Conclude from a publisher's counter what was lost (DESIGN 5)."""
        seen = origin.sequence.take(sequence)
        now_s = asyncio.get_running_loop().time()
        if seen.verdict == "new_life" and self._config.kind == "mooncake":
            # the master's memory is what it published; a shared file store outlives its publishers
            origin.trust()
            for source in self._sources.values():
                source.begin_life("sequence_back", keep=False)
        elif seen.verdict != "next" or seen.missed:
            self._log.warning("relay.gap", source=origin.label, missed=seen.missed, verdict=seen.verdict)
            origin.doubt(now_s, self._doubt_s)

    def _model_of(self, name: str) -> PoolSource | None:
        """Return whose events these are: a store that names no model can only hold the one that there is."""
        if not name and len(self._sources) == 1:
            return next(iter(self._sources.values()))
        return self._sources.get(self._names.get(name, name))

    def _on_profile(self, profile: Profile) -> None:
        source = self._sources.get(profile.model)
        if source is not None:
            source.pool.read_profile(profile)

    def _on_record(self, model: str, record: Record) -> None:
        source = self._sources[model]
        if record.name == self._config.name:
            return
        source.pool.learn(record)
        if source.pool.mirror.changed:
            self._teller.changed.set()

    # ---- LMCache's server: tokens and parents

    def _stream(self, endpoint: str, origin: Origin, source: PoolSource) -> KvEventStream:
        names = {ours: theirs for theirs, ours in self._names.items()}

        def on_events(name: str, decoded: Decoded) -> None:
            self._report(decoded.sequence, decoded.rejects)
            now_s = asyncio.get_running_loop().time()
            source.take(decoded.events, origin, decoded.sequence, decoded.time_s, now_s)

        return KvEventStream(
            endpoint,
            names.get(source.pool.model, source.pool.model),
            self._config.settings.block_size,
            on_events=on_events,
            on_restart=lambda reason: source.begin_life(reason, keep=False),
            on_gap=lambda reason: self._log.warning("relay.gap", source=origin.label, reason=reason),
            on_connection=lambda connected: self._on_connection(origin, connected),
        )

    # ---- both

    def _on_connection(self, origin: Origin, connected: bool) -> None:
        self._log.info("relay.connected" if connected else "relay.disconnected", source=origin.label)
        # LMCache's server says itself what it cannot send again
        doubt_s = 0.0 if self._config.kind == "lmcache" else self._doubt_s
        origin.connection(connected=connected, now_s=asyncio.get_running_loop().time(), doubt_s=doubt_s)

    def _report(self, sequence: int, rejects: Sequence[Reject]) -> None:
        for reject in rejects:
            RELAY_REJECTS.labels(self._config.kind, reject.reason).inc()
        if rejects:
            first = rejects[0]
            self._log.warning(
                "relay.events_refused", sequence=sequence, count=len(rejects), reason=first.reason, at=first.detail
            )

    def _refuse(self, reason: str, detail: str) -> None:
        RELAY_REJECTS.labels(self._config.kind, reason).inc()
        self._log.warning("relay.message_refused", reason=reason, detail=detail)


def _decoder(config: PoolConfig) -> Callable[[bytes, bytes], StoreMessage]:
    """Return (topic, payload) -> what it says."""
    if config.kind == "mooncake":
        pattern = KeyPattern(config.settings.key_pattern) if config.settings.key_pattern else KeyPattern()
        return lambda topic, payload: decode_mooncake(payload, pattern)
    return decode_llmd


def _check(config: PoolConfig) -> None:
    """Raise ConfigError, naming the field, where a pool cannot be relayed as configured."""
    if config.kind not in KINDS:
        raise ConfigError(f"kind: {config.kind!r} is not known; known: {', '.join(KINDS)}")
    if not config.models or not config.endpoints:
        raise ConfigError("models, endpoints: at least one of each")
    for endpoint in config.endpoints:
        if config.kind == "lmcache":
            target_of(endpoint)
        elif "://" not in endpoint:
            raise ConfigError(f"endpoint: {endpoint!r} is no ZMQ address")
    strange = sorted(set(config.settings.models.values()) - set(config.models))
    if strange:
        raise ConfigError(f"models: {strange} are mapped to, but not relayed")
