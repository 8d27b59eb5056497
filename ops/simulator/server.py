"""The simulated engine as a server: vLLM's HTTP routes in front of one or more ranks."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ops.simulator.api import Problem, answer_of, engine_request, model_cards, parse_completion
from ops.simulator.chain import DEFAULT_SEED, root_of
from ops.simulator.dialect import Dialect, dialect_of
from ops.simulator.engine import Finished, Request
from ops.simulator.rank import Rank
from ops.simulator.settings import SimulatorSettings
from schemas.errors import BadRequest, ConfigError, Unavailable

_RANK_HEADER = "x-data-parallel-rank"
_GONE = 499  # nobody reads it

log = structlog.get_logger()


async def run_engine(settings: SimulatorSettings) -> None:
    """Serve until cancelled; every port is bound before the first await.

    Raises:
        ConfigError: a setting cannot be used, or a port is taken.
    """
    settings.check()
    dialect = dialect_of(settings.version)
    root = _root(settings, dialect)
    with contextlib.ExitStack() as opened:
        listener = _listen(settings)
        opened.callback(listener.close)
        ranks: list[Rank] = []
        for number in settings.ranks:
            rank = Rank(settings, number, root, dialect)
            opened.callback(rank.publisher.close)
            ranks.append(rank)
        log.info("simulator.started", replica=settings.name, version=settings.version, ranks=len(ranks))
        async with asyncio.TaskGroup() as tasks:
            for rank in ranks:
                tasks.create_task(rank.run())
                if settings.replay_port:
                    tasks.create_task(rank.publisher.serve_replays())
            tasks.create_task(_serve_http(make_app(settings, ranks), listener))


def make_app(settings: SimulatorSettings, ranks: Sequence[Rank]) -> Starlette:
    """Return the HTTP routes over running ranks."""
    routes = _Routes(settings, ranks)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.complete, methods=["POST"]),
            Route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"]),
            Route("/health", routes.report_health, methods=["GET"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
        ]
    )


class _Routes:
    def __init__(self, settings: SimulatorSettings, ranks: Sequence[Rank]) -> None:
        self._settings = settings
        self._ranks = {rank.number: rank for rank in ranks}
        self._turns = itertools.cycle(ranks)
        self._started_s = int(time.time())

    async def complete(self, http: HttpRequest) -> Response:
        try:
            completion = parse_completion(await http.body())
            request = engine_request(uuid.uuid4().hex, completion, self._settings)
            if request is None:
                return _refuse(404, "NotFoundError", f"The model `{completion.model}` does not exist.")
            finished = await _until_gone(http, self._choose_rank(http), request)
        except BadRequest as error:
            return _refuse(400, "BadRequestError", str(error))
        except Unavailable as error:
            return _refuse(503, "ServiceUnavailableError", str(error))
        if finished is None:
            return Response(status_code=_GONE)
        return _json(answer_of(finished, completion, completion.model or self._settings.model, int(time.time())))

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        done = [rank.reset_prefix_cache() for rank in self._ranks.values()]
        return _json({"success": all(done)})

    async def report_health(self, http: HttpRequest) -> Response:
        return Response()

    async def list_models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": model_cards(self._settings, self._started_s)})

    def _choose_rank(self, http: HttpRequest) -> Rank:
        """Return the rank that the header names, else the next in turn; vLLM too ignores a header without a number."""
        try:
            number = int(http.headers.get(_RANK_HEADER, ""))
        except ValueError:
            return next(self._turns)
        if number not in self._ranks:
            raise BadRequest(f"{_RANK_HEADER}: {number} is none of {list(self._ranks)}")
        return self._ranks[number]


async def _until_gone(http: HttpRequest, rank: Rank, request: Request) -> Finished | None:
    """Return the answer, or None where the client left first; its request is aborted then, as by vLLM."""
    answer = asyncio.ensure_future(rank.answer(request))
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


def _root(settings: SimulatorSettings, dialect: Dialect) -> bytes:
    """Return what all hashes start from; unset and before 0.30 that is random for each start, here for all ranks."""
    if settings.hash_seed is not None:
        return root_of(settings.hash_seed)
    return root_of(DEFAULT_SEED) if dialect.fixed_seed else os.urandom(32)


def _listen(settings: SimulatorSettings) -> socket.socket:
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
