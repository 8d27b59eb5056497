"""What a router says while the index does not know its fleet: each replica is unknown, and why; none is forgotten."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from index.memory_store import MemoryStore
from ops.settings import Settings
from router.app import build_app
from schemas.events import Heartbeat
from schemas.profiles import Holder
from tests.support.engines import HOLDER, profile
from tests.support.writes import beat_of, part, put, write

MODEL = "m"
OTHER = Holder("r", 1)
ALIVE = Heartbeat("live", {"0": 1}, 1.0, "")
PROMPT = {"model": MODEL, "token_ids": list(range(40))}


class Clock:
    """Tells the time that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Losing(MemoryStore):
    """A store that can lose everything."""

    def lose(self) -> None:
        """Forget all models."""
        self._models.clear()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Losing:
    return Losing(clock)


@pytest.fixture
async def router(store: Losing) -> AsyncIterator[httpx.AsyncClient]:
    """A router that reads its table for every question."""
    settings = Settings(models=MODEL, router_refresh_s=-1.0, stale_after_s=5.0, unknown_after_s=30.0)
    transport = httpx.ASGITransport(build_app(store, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def fill(store: Losing, *holders: Holder) -> None:
    """Let holders say something, and live."""
    for holder in holders:
        await put(store, MODEL, write(part([1, 2]), holder=holder, profile=profile()), beat_of(ALIVE, 1, holder))


async def states(router: httpx.AsyncClient) -> dict[str, tuple[str, list[str]]]:
    """Return holder -> state and reasons, as a price tells them."""
    answer = await price(router)
    return {f"{r['replica']}/{r['rank']}": (r["state"], r["reasons"]) for r in answer["replicas"]}


async def price(router: httpx.AsyncClient) -> dict[str, Any]:
    """Return the answer about a prompt."""
    answer: dict[str, Any] = (await router.post("/v1/price", json=PROMPT)).raise_for_status().json()
    return answer


async def readiness(router: httpx.AsyncClient) -> tuple[int, str]:
    """Return the status of `/readyz` and what it says of the model."""
    answer = await router.get("/readyz")
    return answer.status_code, answer.json()["models"][MODEL]


async def test_known_members_outlast_the_loss_of_the_index(router: httpx.AsyncClient, store: Losing) -> None:
    """Unknown while it is lost and while it is rebuilt; each is believed again once it has been heard."""
    await store.setup(MODEL)
    await fill(store, HOLDER, OTHER)
    assert await states(router) == {"r/0": ("live", []), "r/1": ("live", [])}
    store.lose()
    assert await states(router) == dict.fromkeys(("r/0", "r/1"), ("unknown", ["index_lost"]))
    assert await readiness(router) == (503, "index_lost")
    await store.setup(MODEL, {HOLDER: profile(), OTHER: profile()})
    assert await states(router) == dict.fromkeys(("r/0", "r/1"), ("unknown", ["rebuilding"]))
    assert await readiness(router) == (503, "rebuilding")
    await fill(store, OTHER)
    assert await states(router) == {"r/0": ("unknown", ["rebuilding"]), "r/1": ("live", [])}
    assert await readiness(router) == (200, "ready")


async def test_a_router_that_starts_meanwhile_sees_no_empty_fleet(router: httpx.AsyncClient, store: Losing) -> None:
    """It has never known anybody: without an index it says so, and during the rebuild it names who is expected."""
    answer = await price(router)
    assert (answer["replicas"], answer["best"], answer["reject"]) == ([], None, "index_lost")
    await store.setup(MODEL, {HOLDER: profile(), Holder("node7", None): profile()})
    answer = await price(router)
    assert (answer["best"], answer["reject"]) == (None, None)
    (replica,) = answer["replicas"]
    assert (replica["replica"], replica["state"], replica["reasons"]) == ("r", "unknown", ["rebuilding"])
    assert (replica["reusable_tokens"], replica["uncached_tokens"]) == (0, 40)
    listed = (await router.get("/v1/replicas")).json()["models"][0]
    assert listed["index"] == "rebuilding"
    assert [(r["replica"], r["state"], r["engine"], r["life"]) for r in listed["replicas"]] == [
        ("node7", "unknown", "vllm", 0),
        ("r", "unknown", "vllm", 0),
    ]


async def test_who_is_expected_in_vain_does_not_hold_up_a_router(
    router: httpx.AsyncClient, store: Losing, clock: Clock
) -> None:
    """After a while it is silent as any other is whose relay does not speak."""
    await store.setup(MODEL, {HOLDER: profile()})
    clock.now_s += 31.0
    assert await states(router) == {"r/0": ("unknown", ["relay_silent"])}
    assert await readiness(router) == (200, "ready")


async def test_an_empty_fleet_is_one(router: httpx.AsyncClient, store: Losing) -> None:
    """Nobody was ever registered: ready, and no replica to name."""
    await store.setup(MODEL)
    assert (await price(router))["reject"] == "no_replicas"
    assert await readiness(router) == (200, "ready")


async def test_lost_records_are_the_reason_even_without_a_profile(router: httpx.AsyncClient, store: Losing) -> None:
    """A holder of which a heartbeat alone came is unknown because of what it had said before."""
    await store.setup(MODEL)
    await put(store, MODEL, beat_of(ALIVE, 9))
    assert await states(router) == {"r/0": ("unknown", ["records_lost"])}
    await put(store, MODEL, write(holder=OTHER), beat_of(ALIVE, 1, OTHER))
    assert (await states(router))["r/1"] == ("unknown", ["no_profile"])
