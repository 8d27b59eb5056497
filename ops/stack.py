"""A running stack of real parts on loopback: services, topics, worker, router and relays, each a process of its own."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import structlog

from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports
from ops.embedded.redis import EmbeddedRedis
from ops.settings import PREFIX, Settings
from schemas.errors import Unavailable
from schemas.topics import topic_specs
from streams.topics import create_topics

log = structlog.get_logger()

_STOP_S = 15.0
_READY_S = 60.0


class NotReady(Unavailable):
    """A part of the stack that did not come up; the message names its log."""


async def is_ready(router_url: str) -> bool:
    """Return whether a router answers for all of its models."""
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"{router_url}/readyz")).status_code == 200
        except httpx.TransportError:
            return False


class Stack:
    """Starts what is missing and stops what it started, in order; a failed start leaves no process.

    Kafka and Redis are the given ones where settings name them, else embedded.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        brokers: str | None = None,
        redis_url: str | None = None,
        redis_server: Path | None = None,
        folder: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.models = list(models)
        self.brokers = brokers or ""
        self.redis_url = redis_url or ""
        self.kafka: EmbeddedKafka | None = None
        self.redis: EmbeddedRedis | None = None
        self.router_url = ""
        self._redis_server = redis_server
        self._folder = folder
        self._options = dict(options or {})
        self._exit = AsyncExitStack()
        self._parts: dict[str, ChildProcess] = {}

    async def __aenter__(self) -> Self:
        """Start services, topics, one worker and one router."""
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything that was started."""
        await self._exit.aclose()

    async def _start(self) -> None:
        if self._folder is None:
            self._folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-")))
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.brokers:
            self.kafka = EmbeddedKafka(self._folder / "kafka")
            await self._exit.enter_async_context(self.kafka)
            self.brokers = self.kafka.bootstrap
        if not self.redis_url:
            self.redis = EmbeddedRedis(self._folder / "redis", executable=self._redis_server)
            await self._exit.enter_async_context(self.redis)
            self.redis_url = self.redis.url
        await create_topics(self.brokers, topic_specs(self.models, Settings().partitions))
        self._exit.push_async_callback(self._stop_parts)
        self.start_worker()
        await self.start_router()

    def start_worker(self, name: str = "worker") -> ChildProcess:
        """Start a stream worker."""
        return self.start(name, ["worker"])

    async def start_router(self, name: str = "router") -> ChildProcess:
        """Start a router; returns when it answers for all models."""
        (port,) = free_ports(1)
        self.router_url = f"http://{LOOPBACK}:{port}"
        part = self.start(name, ["router"], {"ROUTER_PORT": str(port)})
        failure = await part.ready(partial(is_ready, self.router_url), _READY_S)
        if failure is not None:
            raise NotReady(f"{name} {failure}; its log: {self.log_of(name)}")
        return part

    def start_relay(self, arguments: Sequence[str], name: str = "relay") -> ChildProcess:
        """Start a relay with these arguments of `kvatlas relay`."""
        return self.start(name, ["relay", *arguments])

    def start(self, name: str, arguments: Sequence[str], options: Mapping[str, str] | None = None) -> ChildProcess:
        """Start `kvatlas` with these arguments and the stack's settings."""
        settings = {
            "KAFKA_BROKERS": self.brokers,
            "REDIS_URL": self.redis_url,
            "MODELS": ",".join(self.models),
            "LOG_FORMAT": "json",
            **self._options,
            **(options or {}),
        }
        environment = [f"{PREFIX}{key}={value}" for key, value in settings.items()]
        part = ChildProcess(["env", *environment, sys.executable, "-m", "ops.cli", *arguments], self.log_of(name))
        self._parts[name] = part
        return part

    async def stop_part(self, name: str, *, hard: bool = False) -> None:
        """Stop one part, by SIGTERM or, if `hard`, by SIGKILL."""
        part = self._parts.pop(name)
        if hard:
            part.kill()
        else:
            await part.stop(_STOP_S)

    def check_parts(self) -> None:
        """Raise NotReady where a part ended by itself; the message has the last line of its log."""
        for name, part in self._parts.items():
            if part.exit_code is not None:
                lines = self.log_of(name).read_text(errors="replace").splitlines()
                last = lines[-1] if lines else "its log is empty"
                raise NotReady(f"{name} exited with {part.exit_code}: {last}")

    def log_of(self, name: str) -> Path:
        """Return the log file of a part."""
        assert self._folder is not None  # set when the stack starts
        return self._folder / f"{name}.log"

    async def _stop_parts(self) -> None:
        await asyncio.gather(*(self.stop_part(name) for name in list(self._parts)))


def given_services(settings: Settings) -> tuple[str | None, str | None]:
    """Return the Kafka brokers and the Redis that the environment names; None: to be embedded."""
    defaults = Settings()
    brokers = settings.kafka_brokers if settings.kafka_brokers != defaults.kafka_brokers else None
    redis_url = settings.redis_url if settings.redis_url != defaults.redis_url else None
    return brokers, redis_url


class RouterClient:
    """Asks a router, as a gateway does."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=10.0)

    async def __aenter__(self) -> Self:
        """Open the connection pool."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection pool."""
        await self.http.aclose()

    async def price(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of `POST /v1/price`."""
        response = await self.http.post("/v1/price", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async def statuses(self, model: str) -> dict[str, dict[str, Any]]:
        """Return `GET /v1/replicas` of a model by `replica/rank`."""
        response = await self.http.get("/v1/replicas", params={"model": model})
        response.raise_for_status()
        replicas = response.json()["models"][0]["replicas"]
        return {f"{r['replica']}/{r['rank']}": r for r in replicas}

    async def wait_applied(
        self, model: str, holder: str, sequence: int, *, source: str = "0", timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """Wait until an engine's message is in the index; return the holder's status.

        Raises:
            TimeoutError: it did not come in time; the message says how far the index is.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = (await self.statuses(model)).get(holder, {})
            applied = status.get("applied", {}).get(source, -1)
            if applied >= sequence and status["state"] not in ("unknown", "catching_up"):
                return status
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{holder}: engine sequence {sequence} not applied after {timeout_s} s: {status}")
            await asyncio.sleep(0.005)
