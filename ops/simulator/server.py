"""A simulated engine as a server: its HTTP routes in front of one or more ranks."""

import asyncio
import contextlib
import itertools
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ops.simulator.api import Problem
from ops.simulator.kind import Asked, Kind
from ops.simulator.rank import Rank
from ops.simulator.settings import ServerSettings
from ops.simulator.sglang.kind import SglangKind
from ops.simulator.sglang.settings import SglangSettings
from ops.simulator.vllm import VllmKind
from schemas.errors import BadRequest, ConfigError, Unavailable

_RANK_HEADER = "x-data-parallel-rank"
_GONE = 499  # nobody reads it

log = structlog.get_logger()


async def run_engine(settings: ServerSettings) -> None:
    """Serve until cancelled; every port is bound before the first await.

    Raises:
        ConfigError: a setting cannot be used, or a port is taken.
    """
    settings.check()
    kind = kind_of(settings)
    with contextlib.ExitStack() as opened:
        opened.callback(kind.close)
        listener = _listen(settings)
        opened.callback(listener.close)
        ranks: list[Rank] = []
        for number in settings.ranks:
            rank = kind.rank(number)
            opened.callback(rank.publisher.close)
            ranks.append(rank)
        log.info("simulator.started", replica=settings.name, version=kind.version, ranks=len(ranks))
        async with asyncio.TaskGroup() as tasks:
            for rank in ranks:
                tasks.create_task(rank.run())
                if settings.replay_port:
                    tasks.create_task(rank.publisher.serve_replays())
            tasks.create_task(_serve_http(make_app(kind, ranks), listener))


def kind_of(settings: ServerSettings) -> Kind:
    """Return which engine the settings are of."""
    return SglangKind(settings) if isinstance(settings, SglangSettings) else VllmKind(settings)


def make_app(kind: Kind, ranks: Sequence[Rank]) -> Starlette:
    """Return the HTTP routes over running ranks."""
    routes = _Routes(kind, ranks)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.complete, methods=["POST"]),
            Route(kind.reset_path, routes.reset_prefix_cache, methods=list(kind.reset_methods)),
            Route("/health", routes.report_health, methods=["GET"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
            Route("/metrics", routes.report_metrics, methods=["GET"]),
            *(Route(path, routes.report_info, methods=["GET"]) for path in kind.info_paths),
        ]
    )


class _Routes:
    def __init__(self, kind: Kind, ranks: Sequence[Rank]) -> None:
        self._kind = kind
        self._ranks = {rank.number: rank for rank in ranks}
        self._turns = itertools.cycle(ranks)
        self._started_s = int(time.time())

    async def complete(self, http: HttpRequest) -> Response:
        try:
            asked = self._kind.read(await http.body(), uuid.uuid4().hex, http.headers.get(_RANK_HEADER))
            if asked.request is None:
                return _refuse(404, "NotFoundError", f"The model `{asked.model}` does not exist.")
            finished = await _until_gone(http, self._choose_rank(asked), asked)
        except BadRequest as error:
            return _refuse(400, "BadRequestError", str(error))
        except Unavailable as error:
            return _refuse(503, "ServiceUnavailableError", str(error))
        if finished is None:
            return Response(status_code=_GONE)
        return _json(self._kind.answer(asked, finished, int(time.time())))

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        done = [rank.reset_prefix_cache() for rank in self._ranks.values()]
        return self._kind.answer_reset(done=all(done))

    async def report_health(self, http: HttpRequest) -> Response:
        return Response()

    async def list_models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": self._kind.models(self._started_s)})

    async def report_info(self, http: HttpRequest) -> Response:
        return _json(self._kind.info())

    async def report_metrics(self, http: HttpRequest) -> Response:
        text = self._kind.metrics()
        return Response(status_code=404) if text is None else Response(text, media_type="text/plain")

    def _choose_rank(self, asked: Asked) -> Rank:
        """Return the rank that was asked for, else the next in turn."""
        if asked.rank is None:
            return next(self._turns)
        if asked.rank not in self._ranks:
            raise BadRequest(f"{_RANK_HEADER}: {asked.rank} is none of {list(self._ranks)}")
        return self._ranks[asked.rank]


async def _until_gone(http: HttpRequest, rank: Rank, asked: Asked) -> Any:
    """Return the answer, or None where the client left first; its request is aborted then, as by the engines."""
    answer = asyncio.ensure_future(rank.answer(asked.request))
    gone = asyncio.ensure_future(_disconnection(http))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnection(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _refuse(status: int, kind: str, message: str) -> Response:
    return _json({"error": Problem(message, kind, status)}, status)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        listener = socket.create_server((settings.host, settings.http_port))
    except OSError as error:
        raise ConfigError(f"http_port: {settings.host}:{settings.http_port}: {error}") from error
    # connections inherit it; asyncio does not set it on a listener made here, and an answer then takes 40 ms more
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs the process."""
        yield


async def _serve_http(app: Starlette, listener: socket.socket) -> None:
    """Serve until cancelled, then let answers that are under way go out."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = _HttpServer(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
