"""One replica's way from its engines' sockets to an index, and the truth to compare with."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from index.digests import index_digest
from index.store import HolderRow, Store
from ops.kafka_client import client_options
from ops.settings import Settings
from relays.dialects import EngineSettings
from relays.engine import EngineRank
from relays.process import Relay, RelayConfig, profile_of
from schemas.errors import StaleIndex, StoreUnavailable
from schemas.profiles import Holder, Rank
from tests.support.fake_engine import TOPIC, FakeEngine, Traffic, ports_in_a_row
from tests.support.running import running
from tests.support.waiting import until

FAST = Settings(relay_heartbeat_s=0.2, relay_probe_s=0.8, relay_replay_timeout_s=0.5)
DEADLINE_S = 40.0


class Index(Protocol):
    """What is known of holders, wherever it is kept."""

    async def row(self, name: str, rank: int = 0) -> HolderRow | None:
        """Return what is known of a holder."""

    async def digest(self, name: str, rank: int = 0) -> int:
        """Return a holder's index digest."""


class StoreIndex:
    """The index of a model in a store."""

    def __init__(self, store: Store, model: str) -> None:
        self._store = store
        self._model = model

    async def row(self, name: str, rank: int = 0) -> HolderRow | None:
        """Return what is known of a holder; nothing while the store has lost its data."""
        try:
            rows = await self._store.holders(self._model)
        except (StaleIndex, StoreUnavailable):
            return None
        return next((row for row in rows if row.holder == Holder(name, rank)), None)

    async def digest(self, name: str, rank: int = 0) -> int:
        """Return a holder's index digest."""
        return await self._store.digest(self._model, Holder(name, rank))


class Bench:
    """A replica's engines (one a rank), the truth about them, and an index that must come to equal it."""

    def __init__(
        self,
        brokers: str,
        model: str,
        index: Index,
        *,
        replica: str = "r",
        ranks: int = 1,
        replay: bool = True,
        **engine: Any,
    ) -> None:
        self.model = model
        self.replica = replica
        self.brokers = brokers
        pairs = zip(ports_in_a_row(ranks), ports_in_a_row(ranks), strict=True)
        self.engines = [FakeEngine(ports=ports, **engine) for ports in pairs]
        self.config = RelayConfig(
            model=model,
            replica=replica,
            engine="vllm",
            version="0.32.0",
            ranks=tuple(
                Rank(number, engine.events, engine.replay if replay else None)
                for number, engine in enumerate(self.engines)
            ),
            topic=TOPIC.decode(),
            settings=EngineSettings(block_size=4),
        )
        self.truths = [self.new_truth(rank) for rank in range(ranks)]
        self.traffic = [Traffic(seed=rank, rank=rank) for rank in range(ranks)]
        self.index = index
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open the engines' sockets."""
        for engine in self.engines:
            await self._exits.enter_async_context(engine)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""
        await self._exits.aclose()

    @property
    def arguments(self) -> list[str]:
        """What `kvatlas relay` is told; of one rank."""
        (engine,) = self.engines
        arguments = ["--model", self.model, "--replica", self.replica, "--engine-version", self.config.version]
        arguments += ["--events", engine.events, "--replay", engine.replay, "--topic", TOPIC.decode()]
        return [*arguments, "--set", "block_size=4"]

    @asynccontextmanager
    async def relaying(self, settings: Settings = FAST) -> AsyncIterator[Relay]:
        """A relay in this process."""
        async with running(Relay(self.config, settings, client_options(self.brokers))) as relay:
            yield relay

    async def publish(self, count: int, *, rank: int = 0, lost: float = 0.0, seed: int = 0) -> None:
        """Let an engine publish; that share of the messages is lost on the way."""
        losses = random.Random(seed)
        for _ in range(count):
            payload = self.traffic[rank].message()
            engine = self.engines[rank]
            sequence = engine.lose(payload) if losses.random() < lost else await engine.publish(payload)
            self.truths[rank].take(sequence, payload)

    async def restart_engine(self, rank: int = 0) -> None:
        """Let an engine begin anew, with an empty cache."""
        self.truths[rank] = self.new_truth(rank)
        self.traffic[rank] = Traffic(seed=1000 + rank, rank=rank)
        await self.engines[rank].restart()

    async def row(self, rank: int = 0) -> HolderRow:
        """Return what the index knows of a rank, which it must know."""
        row = await self.index.row(self.replica, rank)
        assert row is not None
        return row

    async def settle(self, *, above_life: int = 0) -> None:
        """Wait until the index has all that the engines said, in a life above that one; then it must be equal."""
        for rank, engine in enumerate(self.engines):
            last = engine.next - 1 if engine.next else None

            async def told(rank: int = rank, last: int | None = last) -> bool:
                row = await self.index.row(self.replica, rank)
                return row is not None and row.life > above_life and row.applied.get("0") == last and not row.broken

            await until(told, DEADLINE_S)
            assert await self.index.digest(self.replica, rank) == self.truth(rank)

    def truth(self, rank: int = 0) -> int:
        """Return the index digest that a rank must have."""
        return index_digest(self.truths[rank].mirror.resident())

    def new_truth(self, rank: int = 0) -> EngineRank:
        """Return a mirror that has heard nothing yet."""
        return EngineRank(profile_of(self.config), Holder(self.replica, rank), 1)
