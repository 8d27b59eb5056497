"""The relay process of one pool: its publishers, the replicas that name its blocks, and one holder a model."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from ops.settings import Settings
from relays.cache.block_table import Limits
from relays.dialects import PoolSettings, pool_profile
from relays.engine_events import Decoded
from relays.lossy import Origin
from relays.mooncake import KeyPattern
from relays.pools.follower import Follower
from relays.pools.lmcache_stream import KvEventStream, target_of
from relays.pools.messages import StoreMessages
from relays.pools.pool import PoolModel
from relays.pools.source import PoolSource
from relays.sockets import EngineSocket, check_address
from relays.teller import Teller
from schemas.errors import ConfigError
from schemas.events import Record
from schemas.profiles import Profile, is_name

log = structlog.get_logger()

KINDS = ("lmcache", "llmd", "mooncake")
_LIMITS = Limits()


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
        self._origins = [Origin(str(number)) for number in range(len(config.endpoints))]  # of a store that publishes
        self._sources = {model: self._source(model, settings) for model in config.models}
        self._reads = asyncio.Event()  # something came from Kafka
        self._log = log.bind(pool=config.name)

    async def run(self) -> None:
        """Relay until cancelled; then stop reading, send what is owed and close."""
        self._log.info("relay.started", kind=self._config.kind, models=list(self._sources))
        try:
            await self._teller.run(self._listeners())
        finally:
            self._context.destroy(linger=0)
            self._log.info("relay.stopped", owed=self._teller.owed)

    def _source(self, model: str, settings: Settings) -> PoolSource:
        config = self._config
        profile = pool_profile(config.kind, model, config.name, config.settings)
        pool = PoolModel(profile, self._teller.next_life(), secret=settings.secret.encode(), limits=_LIMITS)
        source = PoolSource(
            pool,
            # a server is asked for each model by itself
            [Origin("0")] if config.kind == "lmcache" else self._origins,
            self._teller.owner,
        )
        self._teller.speakers.append(source)
        return source

    def _listeners(self) -> list[Coroutine[Any, Any, None]]:
        now_s = asyncio.get_running_loop().time()
        for origin in (origin for source in self._sources.values() for origin in source.origins):
            origin.lost_s = now_s
        if self._config.kind == "lmcache":
            (endpoint,) = self._config.endpoints
            return [self._stream(endpoint, source).run() for source in self._sources.values()]
        for source in self._sources.values():
            source.await_past(_LIMITS.blocks)
        follower = Follower(
            self._client,
            self._config.models,
            on_profile=self._on_profile,
            on_record=self._on_record,
            on_caught_up=self._on_caught_up,
        )
        messages = StoreMessages(self._config.kind, self._config.name, self._config.settings, self._sources)
        subscriptions = [
            self._subscription(EngineSocket(self._context, endpoint, None, ""), origin, messages)
            for endpoint, origin in zip(self._config.endpoints, self._origins, strict=True)
        ]
        return [follower.run(), self._give_up_past(), *subscriptions]

    # ---- stores that publish: names without tokens

    def _subscription(self, socket: EngineSocket, origin: Origin, messages: StoreMessages) -> Coroutine[Any, Any, None]:
        loop = asyncio.get_running_loop()

        def on_message(frames: Sequence[bytes]) -> None:
            messages.take(frames, origin, loop.time())

        def on_connection(connected: bool) -> None:
            messages.connection(origin, connected=connected, now_s=loop.time())

        return socket.receive(on_message, on_connection)

    # ---- what Kafka tells: places, and what an earlier run knew

    def _on_profile(self, profile: Profile) -> None:
        self._reads.set()
        source = self._sources.get(profile.model)
        if source is None:
            return
        source.pool.read_profile(profile)
        if profile.name == self._config.name and source.past is not None:
            source.past.read_profile(profile)

    def _on_record(self, model: str, record: Record) -> None:
        source = self._sources[model]
        if record.holder == source.holder:
            if source.past is not None:
                source.past.take(record)
            return
        source.pool.learn(record)
        if source.pool.mirror.changed:
            self._teller.changed.set()

    def _on_caught_up(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for source in self._sources.values():
            if source.past is not None:
                source.restore(now_s)

    async def _give_up_past(self) -> None:
        """Begin to speak without what an earlier run knew, where reading takes longer than the index believes it."""
        await self._reads.wait()  # without Kafka nothing can be told either
        await asyncio.sleep(self._unknown_after_s)
        for source in self._sources.values():
            if source.past is not None:
                source.forget_past(f"not read within {self._unknown_after_s} s")

    # ---- LMCache's server: tokens and parents

    def _stream(self, endpoint: str, source: PoolSource) -> KvEventStream:
        theirs = {ours: theirs for theirs, ours in self._config.settings.models.items()}
        (origin,) = source.origins
        loop = asyncio.get_running_loop()

        def on_events(name: str, decoded: Decoded) -> None:
            source.refuse(decoded.sequence, decoded.rejects)
            source.take(decoded.events, origin, decoded.sequence, decoded.time_s, loop.time())

        return KvEventStream(
            endpoint,
            theirs.get(source.profile.model, source.profile.model),
            self._config.settings.block_size,
            on_events=on_events,
            on_restart=lambda reason: source.begin_life(reason, keep=False),
            on_gap=lambda reason: self._log.warning("relay.gap", model=source.profile.model, reason=reason),
            on_connection=lambda connected: origin.connection(connected=connected, known=False, now_s=loop.time()),
        )


def _check(config: PoolConfig) -> None:
    """Raise ConfigError, naming the field, where a pool cannot be relayed as configured."""
    if config.kind not in KINDS:
        raise ConfigError(f"kind: {config.kind!r} is not known; known: {', '.join(KINDS)}")
    if not config.models or not config.endpoints:
        raise ConfigError("models, endpoints: at least one of each")
    for name in (config.name, *config.models):
        if not is_name(name):
            raise ConfigError(f"name, models: {name[:80]!r} is no name: empty, too long, or of two lines")
    if config.kind == "lmcache" and len(config.endpoints) > 1:
        raise ConfigError(
            "endpoints: each server of LMCache is a pool by itself: who reads one has not what others have"
        )
    for endpoint in config.endpoints:
        if config.kind == "lmcache":
            target_of(endpoint)
        else:
            check_address(endpoint)
    if config.kind == "mooncake" and config.settings.key_pattern:
        KeyPattern(config.settings.key_pattern)
    strange = sorted(set(config.settings.models.values()) - set(config.models))
    if strange:
        raise ConfigError(f"models: {strange} are mapped to, but not relayed")
