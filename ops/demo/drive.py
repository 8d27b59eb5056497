"""The demo's client: prices the trace's prompts, sends each to the replica that has least to compute, and compares."""

import asyncio
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from statistics import quantiles
from typing import Any, NamedTuple

import httpx
import orjson
import pybase64

from ops.demo.agreement import Agreement
from ops.demo.fleet import MODEL, Engine, Fleet
from ops.demo.trace import Tokens, prompts
from ops.stack import RouterClient
from schemas.errors import Unavailable

_CLIENTS = 6
_COUNTERS = {"gpu": "vllm:prefix_cache_hits_total", "pool": "vllm:external_prefix_cache_hits_total"}


class Reused(NamedTuple):
    """What an engine took from its caches for one prompt."""

    tokens: int
    host_tokens: int  # of these, where it says so: SGLang does, vLLM only counts them


class Drive:
    """Six clients, each with one request at a time."""

    def __init__(self, client: RouterClient, fleet: Fleet) -> None:
        self.agreement = Agreement()
        self._client = client
        self._engines = {engine.name: engine for engine in fleet.engines}
        self._price_s: list[float] = []
        self._by_replica = dict.fromkeys(self._engines, 0)
        self._pending = dict.fromkeys(self._engines, 0)  # tokens that an engine is still to compute
        self._by_tier: Counter[str] = Counter()  # tokens, as the engines count them
        self._began_s = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Begin requests for that long, and wait for the last ones.

        Raises:
            Unavailable: the router or an engine does not answer; the message names it.
        """
        self._began_s = time.monotonic()
        source = itertools.cycle(prompts())
        async with httpx.AsyncClient(timeout=60.0) as http:
            showing = asyncio.create_task(self._show())
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(_CLIENTS):
                        tasks.create_task(self._client_loop(source, http, self._began_s + seconds))
                for engine in self._engines.values():
                    self._by_tier.update(await _counters(http, engine))
            except* httpx.HTTPError as group:
                error = group.exceptions[0]
                assert isinstance(error, httpx.HTTPError)
                raise Unavailable(f"{error.request.url}: {error!r}") from error
            finally:
                showing.cancel()

    def summarize(self) -> None:
        """Print what was found."""
        a = self.agreement
        say("")
        if not a.requests:
            say("no request finished")
            return
        p50, p99 = self._percentiles()
        spread = ", ".join(f"{name} {count}" for name, count in self._by_replica.items())
        say(f"requests     {a.requests} ({spread}), {a.exact} predicted to the token")
        say(f"reuse        {a.reuse:7.2%} of {a.prompt_tokens} prompt tokens came from a cache")
        say(f"by tier      {', '.join(f'{tier} {count}' for tier, count in self._by_tier.items() if count)} tokens")
        say(f"coverage     {a.coverage:7.2%} of the reused tokens had been predicted")
        say(f"over-credit  {a.over_credit:7.2%} of the predicted tokens were not there")
        say(f"/v1/price    p50 {p50:.1f} ms, p99 {p99:.1f} ms")

    async def _client_loop(self, source: Iterator[Tokens], http: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            tokens = next(source)
            packed = pybase64.b64encode(tokens.astype("<u4").tobytes()).decode()
            asked_s = time.perf_counter()
            # given services may still list the replicas of an earlier run
            answer = await self._client.price({"model": MODEL, "tokens_b64": packed, "replicas": list(self._engines)})
            self._price_s.append(time.perf_counter() - asked_s)
            chosen = self._choose(answer["replicas"])
            engine = self._engines[chosen["replica"]]
            self._pending[engine.name] += chosen["uncached_tokens"]
            reused = await _complete(http, engine, tokens)
            self._pending[engine.name] -= chosen["uncached_tokens"]
            self._by_replica[engine.name] += 1
            if engine.kind == "sglang":
                self._by_tier.update(gpu=reused.tokens - reused.host_tokens, host=reused.host_tokens)
            self.agreement.add(len(tokens), chosen["reusable_tokens"], reused.tokens)

    def _choose(self, prices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the replica that would be done first: what it computes of the prompt, behind what it computes now."""
        random.shuffle(prices)  # ties
        return min(prices, key=lambda price: price["uncached_tokens"] + self._pending[price["replica"]])

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            a = self.agreement
            if a.requests:
                p50, _ = self._percentiles()
                say(
                    f"{time.monotonic() - self._began_s:5.0f} s  requests {a.requests:5}  reuse {a.reuse:6.1%}  "
                    f"coverage {a.coverage:7.2%}  over-credit {a.over_credit:6.2%}  price p50 {p50:.1f} ms",
                    over=True,
                )

    def _percentiles(self) -> tuple[float, float]:
        if len(self._price_s) < 2:
            return (self._price_s[0] * 1e3,) * 2 if self._price_s else (0.0, 0.0)
        cuts = quantiles(self._price_s, n=100)
        return cuts[49] * 1e3, cuts[98] * 1e3


def say(line: str, *, over: bool = False) -> None:
    """Print a line; on a terminal a progress line is written over the one before."""
    end = "\r" if over and sys.stdout.isatty() else "\n"
    print(line, end=end, flush=True)  # noqa: T201


async def _complete(http: httpx.AsyncClient, engine: Engine, tokens: Tokens) -> Reused:
    """Return what the engine took from its caches."""
    question = {"model": MODEL, "prompt": tokens, "max_tokens": 4, "return_cached_tokens_details": True}
    body = orjson.dumps(question, option=orjson.OPT_SERIALIZE_NUMPY)
    response = await http.post(
        f"{engine.url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    response.raise_for_status()
    answer = response.json()
    details = answer.get("sglext", {}).get("cached_tokens_details", {})
    return Reused(answer["usage"]["prompt_tokens_details"]["cached_tokens"], details.get("host", 0))


async def _counters(http: httpx.AsyncClient, engine: Engine) -> dict[str, int]:
    """Return the tokens by tier that a vLLM has reused since it started."""
    if engine.kind != "vllm":
        return {}
    response = await http.get(f"{engine.url}/metrics")
    response.raise_for_status()
    counts = dict(re.findall(r"^(\S+)\{.*\} (\d+)$", response.text, re.MULTILINE))
    return {tier: int(counts[name]) for tier, name in _COUNTERS.items()}
