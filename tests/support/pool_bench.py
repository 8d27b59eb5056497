"""A pool's relay between real publishers, Kafka and Redis, beside relays of replicas, and a router that is asked."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from index.redis_store import RedisStore
from ops.kafka_client import client_options
from ops.settings import Settings
from relays.dialects import EngineSettings, PoolSettings
from relays.pools.process import PoolConfig, PoolRelay
from relays.process import Relay, RelayConfig
from router.app import build_app
from schemas.profiles import PoolUse, Rank
from schemas.topics import topic_specs
from streams.topics import create_topics
from tests.support.fake_engine import TOPIC, FakeEngine
from tests.support.fake_store import FakeStore
from tests.support.payloads import batch, pack
from tests.support.pool_frames import file_message, keys_of, object_event, object_message
from tests.support.running import running
from tests.support.topic_index import TopicIndex
from tests.support.vllm_frames import map_stored
from tests.support.vllm_names import names_of
from tests.support.waiting import until

UNIT, SEED, POOL = 4, "0", "shelf"
PARTITIONS = 2
SETTINGS = Settings(
    relay_heartbeat_s=0.1,
    relay_probe_s=0.8,
    relay_unknown_after_s=3.0,
    router_refresh_s=0.02,
    stale_after_s=1.0,
    unknown_after_s=4.0,
)
"""A source or relay that is gone is stale within a second or so, and unknown within four."""


class PoolBench:
    """For each model a replica that stores what it is told, and one that has nothing; both read the pool."""

    def __init__(
        self, brokers: str, redis_url: str, *models: str, kind: str, publishers: int = 1, max_age_s: float = 600.0
    ) -> None:
        self.models = models
        self.kind = kind
        self.brokers = brokers
        self.publishers = [FakeStore() for _ in range(publishers)]
        self.engines = {model: FakeEngine() for model in models}
        self.settings = PoolSettings(block_size=UNIT, hash_seed=SEED, max_age_s=max_age_s)
        self._store = RedisStore.from_urls([redis_url])
        self._exits = AsyncExitStack()
        self.router = httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(self._store, SETTINGS)), base_url="http://router"
        )

    async def __aenter__(self) -> Self:
        """Open everything but the pool's relay, and let the replicas speak."""
        await create_topics(self.brokers, topic_specs(list(self.models), PARTITIONS))
        self._exits.push_async_callback(self._store.close)
        await self._exits.enter_async_context(self.router)
        for publisher in self.publishers:
            await self._exits.enter_async_context(publisher)
        for model, engine in self.engines.items():
            index = TopicIndex(self.brokers, model, PARTITIONS, self._store)
            await self._exits.enter_async_context(index)
            await self._exits.enter_async_context(engine)
            await self._start_replica(model, "warm", engine)
            cold = await self._exits.enter_async_context(FakeEngine())
            await self._start_replica(model, "cold", cold)
            await cold.publish(stored([7] * UNIT))
        await until(self._replicas_are_known)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self._exits.aclose()

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[None]:
        """The pool's relay, once each publisher has been heard."""
        async with self.relaying_of([one.endpoint for one in self.publishers], self.settings):
            for number, publisher in enumerate(self.publishers):
                await publisher.subscribed()
                await self.hear(number)
            yield

    @asynccontextmanager
    async def relaying_of(self, endpoints: Sequence[str], settings: PoolSettings) -> AsyncIterator[None]:
        """The pool's relay, whoever publishes."""
        config = PoolConfig(
            kind=self.kind, name=POOL, models=self.models, endpoints=tuple(endpoints), settings=settings
        )
        async with running(PoolRelay(config, SETTINGS, client_options(self.brokers))):
            yield

    async def hear(self, number: int = 0) -> None:
        """Let a publisher speak of an unknown block until one of these messages is in the index."""
        before = await self.applied(self.models[0], number)

        async def heard() -> bool:
            await self.store(self.models[0], [1], publisher=number)
            return await self.applied(self.models[0], number) not in (before, -1)

        await until(heard)
        await self.settle()

    async def settle(self) -> None:
        """Wait until all that the publishers have said is in the index, of every model."""

        async def settled() -> bool:
            return all(
                [
                    await self.applied(model, number) == publisher.next - 1
                    for model in self.models
                    for number, publisher in enumerate(self.publishers)
                    if publisher.next > 1
                ]
            )

        await until(settled)

    async def applied(self, model: str, number: int) -> int:
        """Return the last message of a publisher that is in the index."""
        sequence: int = (await self.status(model))["applied"].get(str(number), -1)
        return sequence

    async def compute(self, model: str, tokens: Sequence[int]) -> list[int]:
        """Let the warm replica compute a prompt; return its blocks' names."""
        await self.engines[model].publish(stored(tokens))
        return named(tokens)

    async def store(self, model: str, names: Sequence[int], *, publisher: int = 0) -> None:
        """Let the store announce blocks."""
        await self.publishers[publisher].publish(self.message(model, "stored", names))

    async def remove(self, model: str, names: Sequence[int], *, publisher: int = 0) -> None:
        """Let the store announce that blocks are gone."""
        await self.publishers[publisher].publish(self.message(model, "removed", names))

    def message(self, model: str, kind: str, names: Sequence[int]) -> list[bytes]:
        """Return what the store says of blocks."""
        if self.kind == "llmd":
            return file_message(model, (kind, names))
        return object_message(*(object_event(kind, key) for key in keys_of(model, names, [0])))

    async def answers(self, model: str, tokens: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Return what the router says of each replica, for a prompt one token longer."""
        response = await self.router.post("/v1/price", json={"model": model, "token_ids": [*tokens, 9]})
        assert response.status_code == 200, response.text
        return {answer["replica"].rpartition(":")[2]: answer for answer in response.json()["replicas"]}

    async def pooled(self, model: str, tokens: Sequence[int]) -> int:
        """Return what the cold replica would load from the pool."""
        answer = (await self.answers(model, tokens))["cold"]
        pooled: int = answer["cached_tokens"]["pool"]
        assert answer["reusable_tokens"] == pooled == sum(answer["pools"].get(POOL, {}).values())
        return pooled

    async def reasons(self, model: str, tokens: Sequence[int]) -> str:
        """Return why the cold replica's answer is less certain than others."""
        return "; ".join((await self.answers(model, tokens))["cold"]["reasons"])

    async def status(self, model: str) -> dict[str, Any]:
        """Return what the router knows of the pool."""
        response = await self.router.get("/v1/replicas", params={"model": model})
        (answer,) = response.json()["models"]
        rows: list[dict[str, Any]] = [row for row in answer["replicas"] if row["replica"] == POOL]
        return rows[0] if rows else {"state": "", "applied": {}, "life": 0}

    async def _replicas_are_known(self) -> bool:
        return all(["cold" in await self.answers(model, []) for model in self.models])

    async def _start_replica(self, model: str, name: str, engine: FakeEngine) -> None:
        config = RelayConfig(
            model=model,
            replica=f"{model}:{name}",
            engine="vllm",
            version="0.32.0",
            ranks=(Rank(0, engine.events, engine.replay),),
            topic=TOPIC.decode(),
            settings=EngineSettings(block_size=UNIT, hash_seed=SEED, pools=(PoolUse(POOL),)),
        )
        relay = Relay(config, SETTINGS, client_options(self.brokers))
        await self._exits.enter_async_context(running(relay))


def named(tokens: Sequence[int]) -> list[int]:
    """Return what the replicas' engines call a prompt's blocks."""
    return names_of(tokens, UNIT, SEED)


def stored(tokens: Sequence[int]) -> bytes:
    """Return a vLLM engine's message: it has computed a prompt."""
    return pack(batch(map_stored(block_hashes=named(tokens), token_ids=list(tokens), block_size=UNIT)))
