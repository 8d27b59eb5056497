"""What a router refuses, so that no caller costs the others more than a question does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from index.memory_store import MemoryStore
from ops.settings import Settings
from router.api import MAX_MEDIA, MAX_PROMPT_TOKENS, MAX_REPLICAS
from router.app import build_app
from router.fleet import Fleet
from tests.support.engines import HOLDER, profile
from tests.support.writes import part, put, write

MODEL = "m"
SETTINGS = Settings(models=MODEL, router_body_timeout_s=0.05)
RAW = {"content-type": "Application/Octet-Stream"}


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    await store.setup(MODEL)
    await put(store, MODEL, write(part([1, 2]), holder=HOLDER, profile=profile()))
    return store


@pytest.fixture
async def router(store: MemoryStore) -> AsyncIterator[httpx.AsyncClient]:
    """A router of one model with one replica."""
    transport = httpx.ASGITransport(build_app(store, SETTINGS))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def refusal(router: httpx.AsyncClient, **fields: Any) -> tuple[int, str]:
    """Return the status and the error that a question is answered with."""
    response = await router.post("/v1/price", json={"model": MODEL, "token_ids": [1, 2, 3, 4]} | fields)
    return response.status_code, response.json().get("error", "")


async def test_an_answer_names_no_more_replicas_than_may_be_asked_about(router: httpx.AsyncClient) -> None:
    """Each name that is asked about comes back, known or not: a long list would be a much longer answer."""
    names = [f"r{number}" for number in range(MAX_REPLICAS + 1)]
    assert await refusal(router, replicas=names) == (400, "replicas: 4097 names, at most 4096")
    answer = (await router.post("/v1/price", json={"model": MODEL, "token_ids": [1], "replicas": names[1:]})).json()
    assert len(answer["replicas"]) == MAX_REPLICAS
    raw = await router.post("/v1/price", content=b"", params={"model": MODEL, "replicas": ",,," * 2000}, headers=RAW)
    assert (raw.status_code, raw.json()) == (400, {"error": "replicas: 6001 names, at most 4096"})


async def test_media_may_not_lie_over_one_another_without_end(router: httpx.AsyncClient) -> None:
    """Sound in a video lies over its pictures; thousands of spans over every token would be hashed for seconds."""
    tokens = list(range(20))
    spans = [{"id": str(number), "offset": 0, "length": 20} for number in range(9)]
    status, error = await refusal(router, token_ids=tokens, media=spans)
    assert (status, error) == (400, "media: spans of 180 tokens cover 20 more than 8 times")
    assert await refusal(router, token_ids=tokens, media=spans[:8]) == (200, "")
    spans = [{"id": "a", "offset": 0, "length": 1}] * (MAX_MEDIA + 1)
    assert await refusal(router, token_ids=tokens, media=spans) == (400, "media: 4097 spans, at most 4096")


async def test_a_prompt_is_bounded_in_every_form(router: httpx.AsyncClient) -> None:
    """However it is sent, a prompt longer than any engine takes is refused before it is hashed."""
    much = MAX_PROMPT_TOKENS + 1
    ids = b'{"model": "m", "token_ids": [' + b"0," * (much - 1) + b"0]}"
    listed = await router.post("/v1/price", content=ids)
    assert (listed.status_code, listed.json()) == (400, {"error": f"token_ids: {much} tokens, at most {much - 1}"})
    raw = await router.post("/v1/price", content=bytes(4 * much), params={"model": MODEL}, headers=RAW)
    assert (raw.status_code, raw.json()) == (400, {"error": f"body: {much} tokens, at most {much - 1}"})


async def test_a_refusal_does_not_repeat_a_long_name(router: httpx.AsyncClient) -> None:
    """What a caller sent comes back cut."""
    status, error = await refusal(router, model="x" * 100_000)
    assert status == 404
    assert error == f"model: '{'x' * 200}...' is not served here"


async def test_the_type_of_a_raw_body_is_read_in_any_case(router: httpx.AsyncClient) -> None:
    """Media types have no case (RFC 9110, 8.3.1)."""
    raw = await router.post("/v1/price", content=bytes(16), params={"model": MODEL}, headers=RAW)
    assert (raw.status_code, raw.json()["prompt_tokens"]) == (200, 4)


async def test_a_body_that_does_not_come_is_waited_for_so_long(store: MemoryStore) -> None:
    """A caller that sends a part of its body and no more is answered 408."""
    assert await _ask(store, [{"type": "http.request", "body": b"{", "more_body": True}]) == 408


async def test_a_caller_that_leaves_is_counted_and_no_failure(store: MemoryStore) -> None:
    """A connection that is closed in the middle of a body is an answer like others, with nobody to read it."""
    before = _counted("499")
    assert await _ask(store, [{"type": "http.disconnect"}]) == 499
    assert _counted("499") == before + 1


async def test_names_that_callers_make_up_are_not_kept() -> None:
    """A router that is told no models asks the index about each, and remembers a bounded number that it has not."""
    fleet = Fleet(MemoryStore(), stale_after_s=5.0, unknown_after_s=30.0, refresh_s=60.0, clock_s=lambda: 0.0)
    for number in range(1500):
        assert (await fleet.table(f"m{number}")).index == "index_lost"
    assert len(fleet._tables) <= 1000


def _counted(status: str) -> float:
    return REGISTRY.get_sample_value("kvatlas_router_requests_total", {"route": "price", "status": status}) or 0.0


async def _ask(store: MemoryStore, messages: list[dict[str, Any]]) -> int:
    """Return the status for a request of which no more than these messages come."""
    scope = {"type": "http", "method": "POST", "path": "/v1/price", "headers": [], "query_string": b""}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(5.0):
        await build_app(store, SETTINGS)(scope, receive, send)
    assert json.loads(sent[1]["body"])["error"].startswith("body: ")
    status: int = sent[0]["status"]
    return status
