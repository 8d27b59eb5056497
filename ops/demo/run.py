"""Runs the demo: starts everything, replays the trace, shows progress and a summary."""

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from statistics import quantiles
from typing import Any

import httpx
import orjson
import pybase64

from ops.demo.agreement import Agreement
from ops.demo.trace import Tokens, prompts
from ops.embedded.processes import LOOPBACK, free_ports
from ops.settings import Settings
from ops.stack import NotReady, RouterClient, Stack, given_services

MODEL = "demo/simulated-8b"
_ENGINES = 3
_BLOCK_SIZE = 32
_BLOCKS = 16_384
_PREFILL_TOKENS_PER_S = 60_000  # of an engine: a cache then turns over in seconds, not in less than an event takes
_CLIENTS = 6
_READY_S = 60.0


class Engine:
    """Where one simulated engine listens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.http_port, self.events_port, self.replay_port = free_ports(3)
        self.url = f"http://{LOOPBACK}:{self.http_port}"

    def engine_arguments(self) -> list[str]:
        """Return the arguments of `kvatlas engine`."""
        values = {
            "name": self.name,
            "model": MODEL,
            "block_size": _BLOCK_SIZE,
            "blocks": _BLOCKS,
            "prefill_tokens_per_s": _PREFILL_TOKENS_PER_S,
            "http_port": self.http_port,
            "events_port": self.events_port,
            "replay_port": self.replay_port,
        }
        return ["engine", *itertools.chain.from_iterable(("--set", f"{k}={v}") for k, v in values.items())]

    def relay_arguments(self) -> list[str]:
        """Return the arguments of `kvatlas relay`."""
        events, replay = (f"tcp://{LOOPBACK}:{port}" for port in (self.events_port, self.replay_port))
        return [
            *("--model", MODEL, "--replica", self.name, "--engine", "vllm", "--engine-version", "0.32.0"),
            *("--events", events, "--replay", replay),
        ]


async def run_demo(seconds: float, settings: Settings, stop: asyncio.Event) -> int:
    """Return 0 after a whole run, 130 after an interrupted one."""
    brokers, redis_url = given_services(settings)
    _print(f"starting Kafka, Redis, {_ENGINES} simulated engines with relays, a worker and a router ...")
    began_s = time.monotonic()
    engines = [Engine(f"engine-{number}") for number in range(_ENGINES)]
    async with AsyncExitStack() as exits:
        starting = asyncio.create_task(_start(exits, engines, brokers, redis_url))
        if not await _unless(stop, starting):
            return 130
        stack = starting.result()
        _print(f"all ready after {time.monotonic() - began_s:.0f} s; prices at {stack.router_url}/v1/price")
        client = await exits.enter_async_context(RouterClient(stack.router_url))
        drive = Drive(client, engines)
        await _unless(stop, asyncio.create_task(drive.run(seconds)))
        drive.summarize()
    return 130 if stop.is_set() else 0


class Drive:
    """Prices the trace's prompts, sends each to the best replica, and compares."""

    def __init__(self, client: RouterClient, engines: list[Engine]) -> None:
        self.agreement = Agreement()
        self._client = client
        self._engines = {engine.name: engine for engine in engines}
        self._price_s: list[float] = []
        self._by_replica = dict.fromkeys(self._engines, 0)
        self._began_s = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Drive for that long."""
        self._began_s = time.monotonic()
        source = itertools.cycle(prompts())
        async with httpx.AsyncClient(timeout=60.0) as http:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._show())
                    for _ in range(_CLIENTS):
                        tasks.create_task(self._client_loop(source, http))

    def summarize(self) -> None:
        """Print what was found."""
        a = self.agreement
        _print("")
        if not a.requests:
            _print("no request finished")
            return
        p50, p99 = self._percentiles()
        spread = ", ".join(f"{name} {count}" for name, count in self._by_replica.items())
        _print(f"requests     {a.requests} ({spread}), {a.exact} predicted to the token")
        _print(f"reuse        {a.reuse:7.2%} of {a.prompt_tokens} prompt tokens came from a cache")
        _print(f"coverage     {a.coverage:7.2%} of the reused tokens had been predicted")
        _print(f"over-credit  {a.over_credit:7.2%} of the predicted tokens were not there")
        _print(f"/v1/price    p50 {p50:.1f} ms, p99 {p99:.1f} ms")

    async def _client_loop(self, source: Iterator[Tokens], http: httpx.AsyncClient) -> None:
        while True:
            tokens = next(source)
            packed = pybase64.b64encode(tokens.astype("<u4").tobytes()).decode()
            asked_s = time.perf_counter()
            answer = await self._client.price({"model": MODEL, "tokens_b64": packed})
            self._price_s.append(time.perf_counter() - asked_s)
            chosen = _chosen(answer)
            delivered = await _complete(http, self._engines[chosen["replica"]], tokens)
            self._by_replica[chosen["replica"]] += 1
            self.agreement.add(len(tokens), chosen["reusable_tokens"], delivered)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            a = self.agreement
            if a.requests:
                p50, _ = self._percentiles()
                _print(
                    f"{time.monotonic() - self._began_s:5.0f} s  requests {a.requests:5}  reuse {a.reuse:6.1%}  "
                    f"coverage {a.coverage:7.2%}  over-credit {a.over_credit:6.2%}  price p50 {p50:.1f} ms",
                    over=True,
                )

    def _percentiles(self) -> tuple[float, float]:
        if len(self._price_s) < 2:
            return (self._price_s[0] * 1e3,) * 2 if self._price_s else (0.0, 0.0)
        cuts = quantiles(self._price_s, n=100)
        return cuts[49] * 1e3, cuts[98] * 1e3


async def _start(exits: AsyncExitStack, engines: list[Engine], brokers: str | None, redis_url: str | None) -> Stack:
    stack = await exits.enter_async_context(Stack([MODEL], brokers=brokers, redis_url=redis_url))
    for engine in engines:
        stack.start(engine.name, engine.engine_arguments())
        stack.start_relay(engine.relay_arguments(), f"relay-{engine.name}")
    async with RouterClient(stack.router_url) as client:
        deadline_s = time.monotonic() + _READY_S
        while True:
            states = {name: status["state"] for name, status in (await client.statuses(MODEL)).items()}
            # an engine that has served nothing has announced nothing: `silent` is all that can be known
            if len(states) == len(engines) and set(states.values()) <= {"live", "silent"}:
                return stack
            if time.monotonic() > deadline_s:
                raise NotReady(
                    f"after {_READY_S:.0f} s the replicas are {states}; see {stack.log_of('relay-engine-0')}"
                )
            await asyncio.sleep(0.1)


async def _unless(stop: asyncio.Event, task: "asyncio.Task[Any]") -> bool:
    """Wait for the task, but not beyond `stop`; return whether it finished."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        stopped.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _chosen(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the best replica's part of an answer, or the first where nothing is known of any."""
    for replica in answer["replicas"]:
        if f"{replica['replica']}/{replica['rank']}" == answer["best"]:
            found: dict[str, Any] = replica
            return found
    first: dict[str, Any] = answer["replicas"][0]
    return first


async def _complete(http: httpx.AsyncClient, engine: Engine, tokens: Tokens) -> int:
    """Return how many tokens the engine took from its cache."""
    question = {"model": MODEL, "prompt": tokens, "max_tokens": 4}
    body = orjson.dumps(question, option=orjson.OPT_SERIALIZE_NUMPY)
    response = await http.post(
        f"{engine.url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    response.raise_for_status()
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _print(line: str, *, over: bool = False) -> None:
    """Print a line; on a terminal a progress line is written over the one before."""
    terminal = sys.stdout.isatty()
    end = "\r" if over and terminal else "\n"
    print(line, end=end, flush=True)  # noqa: T201
