"""`kvatlas doctor`: a deployment's wiring step by step, up to the first thing that is wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import msgspec
import zmq.asyncio

from index.redis_store import RedisStore
from index.store import HolderRow
from ops.check.report import Finding, is_fit, lines_of
from ops.check.wiring import heartbeats
from ops.kafka_client import client_options
from ops.registry import read_entries
from ops.settings import Settings, listed
from ops.stack import RouterClient
from relays.sockets import EngineSocket
from schemas.errors import Stale, Unavailable
from schemas.events import Heartbeat
from schemas.profiles import Holder, Profile, Rank, join_mismatch
from schemas.topics import topic_specs
from streams.topics import create_topics, missing_topics

_ENGINE_S = 5.0
_BEATS = 4  # heartbeat intervals in which every relay must have spoken
_EVENTS_FLAGS = {
    "vllm": "vLLM: --kv-events-config with enable_kv_cache_events, publisher zmq, endpoint and replay_endpoint",
    "sglang": "SGLang: --kv-events-config with publisher zmq, endpoint and replay_endpoint",
    "trtllm": "TensorRT-LLM: kv_cache_config.event_buffer_max_size and enable_block_reuse",
}


class Doctor:
    """Looks at one model's deployment; settings are those of the services."""

    def __init__(self, model: str, settings: Settings, router_url: str) -> None:
        self._model = model
        self._settings = settings
        self._router_url = router_url
        self._client = client_options(settings.kafka_brokers, settings.security)
        self._profiles: dict[str, Profile] = {}
        self._beats: dict[Holder, Heartbeat] = {}

    async def steps(self) -> AsyncIterator[Finding]:
        """Yield each step's finding, the first wrong one last."""
        for step in (
            self._topics,
            self._replicas,
            self._engines,
            self._replays,
            self._relays,
            self._redis,
            self._router,
            self._pools,
        ):
            try:
                finding = await step()
            except (Unavailable, Stale) as error:
                finding = Finding(step.__name__.strip("_"), "unfit", str(error))
            yield finding
            if finding.verdict == "unfit":
                return

    @property
    def _replica_profiles(self) -> list[Profile]:
        return [profile for profile in self._profiles.values() if profile.ranks]

    async def _topics(self) -> Finding:
        specs = topic_specs([self._model], self._settings.partitions)
        try:
            missing = await missing_topics(
                self._settings.kafka_brokers, [spec.name for spec in specs], self._settings.security
            )
        except Unavailable as error:
            return Finding("kafka", "unfit", str(error), "KVATLAS_KAFKA_BROKERS")
        if missing:
            return Finding("topics", "unfit", f"missing: {', '.join(sorted(missing))}", "kvatlas topics")
        reports = await create_topics(self._settings.kafka_brokers, specs, self._settings.security)
        wrong = [f"{r.name} {d.setting}: {d.found}, not {d.wanted}" for r in reports for d in r.differences]
        if wrong:
            return Finding("topics", "unfit", "; ".join(wrong), "the broker's settings of these topics")
        return Finding("topics", "fit", f"{len(specs)} topics with their settings at {self._settings.kafka_brokers}")

    async def _replicas(self) -> Finding:
        entries = await read_entries(self._client)
        profiles = [entry.profile for entry in entries.values() if entry.profile.model == self._model]
        self._profiles = {profile.name: profile for profile in profiles}
        if not self._profiles:
            others = sorted({entry.profile.model for entry in entries.values()})
            text = f"no relay has registered a replica of {self._model!r}"
            return Finding(
                "replicas",
                "unfit",
                text + (f"; there are some of {others}" if others else ""),
                f"kvatlas relay --model {self._model} beside each engine",
            )
        told = [f"{name} ({p.engine} {p.version})".replace(" )", ")") for name, p in sorted(self._profiles.items())]
        return Finding("replicas", "fit", ", ".join(told))

    # ---- engines

    async def _engines(self) -> Finding:
        wrong: list[Finding] = []
        reached = 0
        for profile in self._replica_profiles:
            for rank in profile.ranks:
                if await _reachable(rank):
                    reached += 1
                else:
                    wrong.append(
                        Finding(
                            "engines",
                            "unfit",
                            f"{profile.name}/{rank.rank}: no events at {rank.endpoint} (as its relay was told)",
                            _EVENTS_FLAGS.get(profile.engine, "--events of its relay"),
                        )
                    )
        return wrong[0] if wrong else Finding("engines", "fit", f"{reached} publish where their relays listen")

    async def _replays(self) -> Finding:
        without: list[str] = []
        answered = 0
        for profile in self._replica_profiles:
            if profile.replay == "none":
                continue
            for rank in profile.ranks:
                if rank.replay_endpoint is None:
                    without.append(f"{profile.name}/{rank.rank}")
                elif await _replays(rank):
                    answered += 1
                else:
                    return Finding(
                        "replays",
                        "unfit",
                        f"{profile.name}/{rank.rank}: {rank.replay_endpoint} does not answer",
                        "replay_endpoint in --kv-events-config",
                    )
        if without:
            return Finding(
                "replays",
                "note",
                f"none for {', '.join(without)}: a gap costs the whole index of such a replica",
                "replay_endpoint in --kv-events-config, and --replay of the relay",
            )
        return Finding("replays", "fit", f"{answered} answer")

    # ---- relays, topic and index

    async def _relays(self) -> Finding:
        self._beats = await heartbeats(self._client, self._model, _BEATS * self._settings.relay_heartbeat_s)
        silent = sorted(name for name in self._profiles if not any(holder.name == name for holder in self._beats))
        if silent:
            return Finding(
                "relays",
                "unfit",
                f"silent: {', '.join(silent)}",
                "is `kvatlas relay` running beside them, and does its log say relay.broker_unavailable?",
            )
        doubtful = [
            f"{holder} {beat.state} ({beat.reason})"
            for holder, beat in sorted(self._beats.items(), key=str)
            if beat.state not in ("live", "silent")
        ]
        if doubtful:
            return Finding("relays", "unfit", "; ".join(doubtful), "the reason is the relay's own")
        return Finding("relays", "fit", f"{len(self._beats)} holders beat in the model's topic")

    async def _redis(self) -> Finding:
        settings = self._settings
        store = RedisStore.from_urls(
            listed(settings.redis_url), settings.shards, timeout_s=settings.router_redis_timeout_s
        )
        try:
            rows = {row.holder: row for row in await store.holders(self._model)}
        except Unavailable as error:
            return Finding("redis", "unfit", str(error), "KVATLAS_REDIS_URL")
        except Stale as error:
            return Finding("index", "unfit", str(error), f"a worker with KVATLAS_MODELS={self._model}")
        finally:
            await store.close()
        behind = [_behind(holder, rows.get(holder), settings) for holder in sorted(self._beats, key=str)]
        wrong = [text for text in behind if text]
        if wrong:
            return Finding(
                "index",
                "unfit",
                "; ".join(wrong),
                f"is a worker with KVATLAS_MODELS={self._model} running, with this broker and this Redis?",
            )
        return Finding("index", "fit", f"{len(rows)} holders, all as fresh as the topic")

    async def _router(self) -> Finding:
        async with AsyncExitStack() as exits:
            client = await exits.enter_async_context(RouterClient(self._router_url))
            try:
                statuses = await client.statuses(self._model)
                answer = await client.price({"model": self._model, "token_ids": list(range(64))})
            except httpx.HTTPError as error:
                return Finding(
                    "router",
                    "unfit",
                    f"{self._router_url}: {error!r}",
                    f"kvatlas router with KVATLAS_MODELS={self._model}; --router of this command",
                )
        unknown = [f"{name} ({', '.join(s['reasons'])})" for name, s in statuses.items() if s["state"] == "unknown"]
        if unknown or not answer["replicas"]:
            return Finding(
                "router", "unfit", f"unknown there: {', '.join(unknown) or 'all'}", "KVATLAS_REDIS_URL of the router"
            )
        return Finding("router", "fit", f"prices {len(answer['replicas'])} ranks, best {answer['best']}")

    async def _pools(self) -> Finding:
        """Judge whether every pool that a replica names exists and names blocks as the replica does."""
        joined: list[str] = []
        for profile in self._replica_profiles:
            for use in profile.pools:
                pool = self._profiles.get(use.name)
                if pool is None:
                    return Finding(
                        "pools",
                        "unfit",
                        f"{profile.name} reads {use.name}, of which no relay tells",
                        f"kvatlas pool --name {use.name} --model {self._model}",
                    )
                mismatch = join_mismatch(pool, profile) if use.named_by == "engine_hash" else ""
                if mismatch:
                    return Finding(
                        "pools",
                        "unfit",
                        f"{profile.name} and {use.name}: {mismatch}",
                        "equal PYTHONHASHSEED, prefix-caching hash algorithm and block size, told to both relays",
                    )
                joined.append(f"{profile.name} reads {use.name}")
        return Finding("pools", "fit", ", ".join(joined) or "no replica reads any")


async def doctor(model: str, settings: Settings, router_url: str, *, as_json: bool) -> int:
    """Print the steps as they are made; return 0 where nothing is wrong, else 1."""
    findings: list[Finding] = []
    async for finding in Doctor(model, settings, router_url).steps():
        findings.append(finding)
        if not as_json:
            for line in lines_of([finding]):
                _print(line)
    if as_json:
        _print(msgspec.json.encode(findings).decode())
    return 0 if is_fit(findings) else 1


def _behind(holder: Holder, row: HolderRow | None, settings: Settings) -> str:
    if row is None:
        return f"{holder} is not in the index"
    if row.broken:
        return f"{holder}: records were lost; its relay will say everything again"
    if row.age_s is None or row.age_s > settings.stale_after_s:
        return f"{holder}: last heartbeat folded {row.age_s:.0f} s ago" if row.age_s else f"{holder}: none folded"
    return ""


async def _reachable(rank: Rank) -> bool:
    """Return whether somebody listens at a rank's endpoint; a question over HTTP would take the events away."""
    if rank.endpoint.startswith("http"):
        url = httpx.URL(rank.endpoint)
        return await _accepts(url.host, url.port or 80)
    context = zmq.asyncio.Context()
    connected = asyncio.Event()
    socket = EngineSocket(context, rank.endpoint, None, "")
    receiving = asyncio.create_task(socket.receive(lambda _: None, lambda up: connected.set() if up else None))
    try:
        async with asyncio.timeout(_ENGINE_S):
            await connected.wait()
    except TimeoutError:
        return False
    else:
        return True
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        context.destroy(0)


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_ENGINE_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _replays(rank: Rank) -> bool:
    context = zmq.asyncio.Context()
    try:
        socket = EngineSocket(context, rank.endpoint, rank.replay_endpoint, "")
        # all ones asks for nothing but the end mark (engines/vllm-events.md 1.4)
        return await socket.replay((1 << 64) - 1, lambda *_: None, lambda _: None, _ENGINE_S)
    finally:
        context.destroy(0)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201
