"""Probe prompts for a live engine: what to ask, and what it says that it reused (OpenAI completions API)."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from schemas.errors import Unavailable

_LOWEST, _HIGHEST = 10, 900  # token ids that any vocabulary has
_TIMEOUT_S = 120.0


class Probe(NamedTuple):
    """One prompt of token ids."""

    name: str
    tokens: list[int]
    salt: str | None = None


class Answer(NamedTuple):
    """What an engine did with it."""

    cached_tokens: int | None  # None: it does not say
    prompt_tokens: int


def probes(unit: int, longest: int, *, salted: bool, seed: int | None = None) -> Iterator[Probe]:
    """Yield prompts in the order in which they must be sent; no other client has ever sent their tokens.

    Args:
        unit: tokens of an index block.
        longest: tokens of the longest prompt that the engine takes.
        salted: its events tell the salt.
    """
    rng = random.Random(seed)

    def fresh(count: int) -> list[int]:
        return [rng.randrange(_LOWEST, _HIGHEST) for _ in range(count)]

    blocks = max(2, min(6, (longest - 2 * unit) // unit - 1))
    whole = fresh(blocks * unit + unit // 2)
    yield Probe("new", whole)
    yield Probe("again", whole)
    yield Probe("whole-blocks", whole[: blocks * unit])
    yield Probe("half", whole[: blocks // 2 * unit] + fresh(unit + 1))
    yield Probe("longer", whole + fresh(unit))
    yield Probe("longer-again", whole + fresh(unit // 2 + 1))
    yield Probe("one-block", whole[:unit])
    yield Probe("other", fresh(unit + 3))
    if salted:
        yield Probe("salted", whole, "kvatlas-check")
        yield Probe("salted-again", whole, "kvatlas-check")


class EngineApi:
    """An engine's HTTP side."""

    def __init__(self, url: str, engine: str) -> None:
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), timeout=_TIMEOUT_S)
        self._url = url
        self._engine = engine
        self._model = ""
        self.longest_tokens = 1024

    async def __aenter__(self) -> "EngineApi":
        """Look at the served model."""
        models = (await self._get("/v1/models"))["data"]
        self._model = models[0]["id"]
        self.longest_tokens = int(models[0].get("max_model_len") or self.longest_tokens)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def version(self) -> str | None:
        """Return what the engine says of its version; None: it does not say."""
        paths = ("/version",) if self._engine == "vllm" else ("/server_info", "/get_server_info")
        for path in paths:
            try:
                return str((await self._get(path))["version"])
            except (Unavailable, KeyError):
                continue
        return None

    async def send(self, probe: Probe) -> Answer:
        """Send a probe and return what was reused of it.

        Raises:
            Unavailable: the engine does not answer, or refuses the prompt; the message says what it said.
        """
        body: dict[str, Any] = {"model": self._model, "prompt": probe.tokens, "max_tokens": 2, "temperature": 0}
        if probe.salt is not None:
            body["cache_salt"] = probe.salt
        try:
            response = await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._url}: {error!r}") from error
        if response.status_code != 200:
            raise Unavailable(f"{self._url}: probe {probe.name}: {response.status_code} {response.text[:200]}")
        usage = response.json()["usage"]
        details = usage.get("prompt_tokens_details")
        cached = None if details is None else int(details.get("cached_tokens") or 0)
        return Answer(cached, int(usage["prompt_tokens"]))

    async def _get(self, path: str) -> Any:
        try:
            response = await self._http.get(path)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"{self._url}{path}: {error!r}") from error
