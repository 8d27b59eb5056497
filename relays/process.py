"""The relay process of one replica: all of its ranks, mirrored and told."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from ops.settings import Settings
from relays.dialects import EngineSettings, profile_for
from relays.engine import EngineRank
from relays.lossy_rank import LossyRank
from relays.rank import RankRelay
from relays.sockets import EngineSocket, check_address
from relays.source import RankSource
from relays.teller import Teller
from relays.trtllm_poller import EventPoller, PulledRank, events_url
from schemas.errors import ConfigError
from schemas.profiles import Holder, Profile, Rank, is_name

log = structlog.get_logger()


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
        self._profile = profile_of(config)
        self._teller = Teller(settings, client, engine=config.engine)
        self._context = zmq.asyncio.Context()
        self._ranks: list[RankSource] = []

    @property
    def owed(self) -> int:
        """Records that Kafka has not acknowledged; what more there is to say waits in the mirrors as a difference."""
        return self._teller.owed

    async def run(self) -> None:
        """Relay until cancelled; then stop reading, send what is owed and close."""
        sources = self._pulled() if self._profile.dialect == "trtllm" else self._published()
        log.info("relay.started", replica=self._config.replica, ranks=len(self._ranks))
        try:
            await self._teller.run(source.run() for source in sources)
        finally:
            self._context.destroy(linger=0)
            received = {str(rank.engine.holder): rank.engine.received for rank in self._ranks}
            log.info("relay.stopped", replica=self._config.replica, received=received, owed=self._teller.owed)

    def _published(self) -> Sequence[RankRelay | LossyRank]:
        """Return what listens, a source for each rank."""
        new_rank = self._lossy_rank if self._profile.replay == "none" else self._rank
        return [new_rank(rank) for rank in self._config.ranks]

    def _pulled(self) -> Sequence[EventPoller]:
        """Return what asks, one source for all ranks; more of them may come with their events."""

        def new_rank(number: int) -> PulledRank:
            rank = PulledRank(self._engine(number), self._teller.owner)
            self._add(rank)
            return rank

        poller = EventPoller(
            self._config.ranks[0].endpoint,
            [new_rank(rank.rank) for rank in self._config.ranks],
            new_rank,
            idle_s=self._settings.relay_idle_poll_s,
            timeout_s=self._settings.relay_poll_timeout_s,
        )
        return [poller]

    def _rank(self, rank: Rank) -> RankRelay:
        relay = RankRelay(
            self._engine(rank.rank),
            EngineSocket(self._context, rank.endpoint, rank.replay_endpoint, self._config.topic),
            self._teller.owner,
            probe_s=self._settings.relay_probe_s,
            replay_timeout_s=self._settings.relay_replay_timeout_s,
            buffer_messages=self._settings.relay_buffer_messages,
        )
        self._add(relay)
        return relay

    def _lossy_rank(self, rank: Rank) -> LossyRank:
        relay = LossyRank(
            self._engine(rank.rank),
            EngineSocket(self._context, rank.endpoint, None, self._config.topic),
            self._teller.owner,
        )
        self._add(relay)
        return relay

    def _add(self, rank: RankSource) -> None:
        self._ranks.append(rank)
        self._teller.speakers.append(rank)

    def _engine(self, rank: int) -> EngineRank:
        return EngineRank(
            self._profile,
            Holder(self._config.replica, rank),
            self._teller.next_life(),
            secret=self._settings.secret.encode(),
        )


def profile_of(config: RelayConfig) -> Profile:
    """Return the profile that configuration and dialect table give.

    Raises:
        ConfigError: names that nothing can have, an engine that is not known here, or settings that it cannot have.
    """
    for field in ("model", "replica"):
        if not is_name(getattr(config, field)):
            raise ConfigError(f"{field}: {getattr(config, field)[:80]!r} is no name: empty, too long, or of two lines")
    profile = profile_for(config.engine, config.model, config.replica, config.version, config.settings)
    pulled = profile.dialect == "trtllm"
    for rank in config.ranks:
        if is_http(rank.endpoint) != pulled:
            how = "transport=http asks an HTTP address" if pulled else "this engine's events come over ZMQ"
            raise ConfigError(f"endpoint: {rank.endpoint!r}; {how}")
        if pulled:
            events_url(rank.endpoint)
        else:
            check_address(rank.endpoint)
        if rank.replay_endpoint is not None:
            check_address(rank.replay_endpoint)
            if rank.replay_endpoint == rank.endpoint:
                raise ConfigError(f"replay: {rank.endpoint!r} publishes the events; replays have another address")
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
