"""The ASGI application: routes, their lifespan, and what becomes of errors."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from index.liveness import BELIEVED
from index.lookup import Prompt, reaches
from index.match import NOTHING, Reach
from index.store import Store
from ops.metrics import ROUTER_PRICE, ROUTER_REQUESTS, ROUTER_UNKNOWN
from ops.settings import Settings, listed
from router.api import PriceAnswer, ReplicaPrice, Replicas, ReplicaStatus, encode, parse_price, parse_raw, quoted
from router.fleet import Fleet, Member, Table
from router.pricing import choose, merge_ranks, price, unknown
from schemas.errors import BadRequest, StaleIndex, StoreUnavailable
from schemas.profiles import Holder

log = structlog.get_logger()


class UnknownModel(BadRequest):
    """A model that this router does not serve."""


class TooLarge(BadRequest):
    """A body beyond the limit."""


class TooSlow(BadRequest):
    """A body that did not come in time."""


class Left(BadRequest):
    """A caller that did not wait for the answer."""


_STATUS: dict[type[BadRequest], int] = {UnknownModel: 404, TooSlow: 408, TooLarge: 413, Left: 499}  # else 400


class Router:
    """Answers questions from the store; holds nothing but a table of holders that it can read again."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._models = listed(settings.models)
        self._secret = settings.secret.encode()
        self._max_body_bytes = settings.router_max_body_bytes
        self._body_timeout_s = settings.router_body_timeout_s
        self._rng = random.Random()
        self._refresh_s = settings.router_refresh_s
        self.stopping = False
        self.fleet = Fleet(
            store,
            stale_after_s=settings.stale_after_s,
            unknown_after_s=settings.unknown_after_s,
            refresh_s=settings.router_refresh_s,
            clock_s=time.monotonic,
        )

    async def price(self, request: Request) -> Response:
        """`POST /v1/price`."""
        body = await self._body(request)
        with ROUTER_PRICE.time():
            if request.headers.get("content-type", "").lower().startswith("application/octet-stream"):
                prompt, replicas = parse_raw(body, request.query_params)
            else:
                prompt, replicas = parse_price(body)
            answer = await self._price(prompt, replicas)
        return _json(answer)

    async def replicas(self, request: Request) -> Response:
        """`GET /v1/replicas`, of all models or of `?model=`."""
        asked = request.query_params.get("model")
        models = [self._served(asked)] if asked is not None else self._models or self.fleet.models
        answers: list[Replicas] = []
        for model in models:
            table = await self.fleet.refresh(model)
            statuses = [_status(holder, member, table) for holder, member in sorted(table.members.items(), key=_name)]
            answers.append(Replicas(model=model, index=table.readiness, replicas=statuses))
        return _json({"models": answers})

    async def healthz(self, request: Request) -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """The index of every configured model answers, and is not one that has yet to learn of its whole fleet."""
        tables = {model: (await self.fleet.table(model)).readiness for model in self._models}
        ready = all(index == "ready" for index in tables.values())
        return _json({"ready": ready, "models": tables}, status=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def keep_fresh(self) -> None:
        """Read the tables of configured models again and again, so that no request waits for it.

        Ends when cancelled or told to: Python 3.11's `wait_for`, which redis-py connects with, can lose a cancellation
        (python/cpython#86296).
        """
        while not self.stopping:
            for model in self._models:
                await self.fleet.refresh(model)
            await asyncio.sleep(self._refresh_s)

    async def _price(self, prompt: Prompt, replicas: list[str] | None) -> PriceAnswer:
        table = await self.fleet.table(self._served(prompt.model))
        pools = {h: m for h, m in table.members.items() if h.rank is None}
        asked = None if replicas is None else set(replicas)
        members = {h: m for h, m in table.members.items() if h not in pools and (asked is None or h.name in asked)}
        found: dict[Holder, Reach] = {}
        doubt = "" if table.index == "ready" else table.index
        if not doubt:
            questions = [m.question for m in members.values() if m.question is not None]
            believed = [m.question for m in pools.values() if m.question is not None and m.judgement.state in BELIEVED]
            try:
                found = await reaches(self._store, prompt, questions, believed, secret=self._secret)
            except StaleIndex:
                doubt = "index_lost"
            except StoreUnavailable as error:
                doubt = "store_unavailable"
                log.warning("router.store_unavailable", error=str(error))
        prices = [_price_member(h, m, found.get(h), prompt.prompt_tokens, doubt) for h, m in members.items()]
        for name in sorted((asked or set()) - {holder.name for holder in members}):
            prices.append(unknown(name, None, prompt.prompt_tokens, doubt or "never_heard_of"))
        _tell_pools(prices, members, pools)
        prices = _one_where_no_rank_can_be_picked(prices, members)
        for answer in prices:
            if answer.state == "unknown":
                ROUTER_UNKNOWN.labels(answer.reasons[0] if answer.reasons else "").inc()
        reject = None
        if not prices:
            reject = doubt or "no_replicas"
        return PriceAnswer(
            model=prompt.model,
            prompt_tokens=prompt.prompt_tokens,
            best=choose(prices, self._rng),
            reject=reject,
            replicas=prices,
        )

    def _served(self, model: str) -> str:
        if self._models and model not in self._models:
            raise UnknownModel(f"model: {quoted(model)} is not served here")
        return model

    async def _body(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self._max_body_bytes:
                        raise TooLarge(f"body: more than {self._max_body_bytes} bytes")
                    chunks.append(chunk)
        except TimeoutError as error:
            raise TooSlow(f"body: {size} bytes came within {self._body_timeout_s} s, and not the rest") from error
        except ClientDisconnect as error:
            raise Left(f"body: the caller left after {size} bytes") from error
        return b"".join(chunks)


def build_app(store: Store, settings: Settings, close: Callable[[], Awaitable[None]] | None = None) -> Starlette:
    """Return the application; `close` is awaited when it stops."""
    router = Router(store, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            fresh = tasks.create_task(router.keep_fresh())
            yield
            router.stopping = True
            fresh.cancel()
        if close is not None:
            await close()

    return Starlette(
        routes=[
            Route("/v1/price", _counted("price", router.price), methods=["POST"]),
            Route("/v1/replicas", _counted("replicas", router.replicas)),
            Route("/healthz", router.healthz),
            Route("/readyz", router.readyz),
            Route("/metrics", router.metrics),
        ],
        lifespan=lifespan,
    )


def _counted(route: str, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler with its answers counted and its refusals turned into statuses."""

    async def handle(request: Request) -> Response:
        try:
            response = await handler(request)
        except BadRequest as error:
            response = _json({"error": str(error)}, status=_STATUS.get(type(error), 400))
        ROUTER_REQUESTS.labels(route, str(response.status_code)).inc()
        return response

    return handle


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def _name(item: tuple[Holder, Member]) -> tuple[str, int]:
    return item[0].name, -1 if item[0].rank is None else item[0].rank


def _price_member(holder: Holder, member: Member, reach: Reach | None, prompt_tokens: int, doubt: str) -> ReplicaPrice:
    if doubt:
        return unknown(holder.name, holder.rank, prompt_tokens, doubt)
    if member.judgement.state not in BELIEVED:
        return price(holder, member.judgement, NOTHING, prompt_tokens)
    if member.question is None:
        return unknown(holder.name, holder.rank, prompt_tokens, "no_profile")
    return price(holder, member.judgement, reach, prompt_tokens)


def _tell_pools(prices: list[ReplicaPrice], members: dict[Holder, Member], pools: dict[Holder, Member]) -> None:
    """Say of each replica which of its pools are not simply live."""
    for answer in prices:
        member = members.get(Holder(answer.replica, answer.rank))
        profile = member.row.profile if member is not None else None
        if profile is None:
            continue
        for use in profile.pools:
            pool = pools.get(Holder(use.name, None))
            state = pool.judgement.state if pool is not None else "unknown"
            if state != "live":
                why = ", ".join(pool.judgement.reasons) if pool is not None else "never_heard_of"
                answer.reasons.append(f"pool {use.name}: {state}" + (f" ({why})" if why else ""))


def _one_where_no_rank_can_be_picked(prices: list[ReplicaPrice], members: dict[Holder, Member]) -> list[ReplicaPrice]:
    fixed = {h.name for h, m in members.items() if m.row.profile is not None and not m.row.profile.rank_selectable}
    if not fixed:
        return prices
    by_name: defaultdict[str, list[ReplicaPrice]] = defaultdict(list)
    for answer in prices:
        by_name[answer.replica].append(answer)
    merged: list[ReplicaPrice] = []
    for name, answers in by_name.items():
        merged += [merge_ranks(answers)] if name in fixed else answers
    return merged


def _status(holder: Holder, member: Member, table: Table) -> ReplicaStatus:
    row, profile = member.row, member.row.profile
    ready = table.index == "ready"
    return ReplicaStatus(
        replica=holder.name,
        rank=holder.rank,
        state=member.judgement.state if ready else "unknown",
        reasons=list(member.judgement.reasons) if ready else [table.index],
        engine=profile.engine if profile else "",
        version=profile.version if profile else "",
        unit=profile.unit if profile else 0,
        life=row.life,
        record_sequence=row.sequence,
        received=row.received,
        applied=row.applied,
        share_known=row.share_known,
        age_s=row.age_s,
    )
