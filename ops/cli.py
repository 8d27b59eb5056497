"""The command `kvatlas`."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from ops import logs, metrics
from ops.kafka_client import client_options
from ops.settings import Settings, listed, load
from schemas.errors import ConfigError, PipelineError
from schemas.topics import topic_specs

log = structlog.get_logger()

Given = TypeVar("Given", bound=msgspec.Struct)

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; configuration errors are one line on stderr and exit code 2."""
    try:
        arguments = _parser().parse_args()
        settings = load(os.environ)
        # a tool's stdout is its result
        logs.configure(settings.log_level, settings.log_format, sys.stderr if arguments.tool else sys.stdout)
        code = arguments.run(arguments, settings)
    except ConfigError as error:
        print(f"kvatlas: {error}", file=sys.stderr)  # noqa: T201
        code = 2
    except PipelineError as error:
        print(f"kvatlas: {error}", file=sys.stderr)  # noqa: T201
        code = 1
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvatlas",
        description="A live index of what every LLM replica has in its KV cache, and a price for each prompt.",
        epilog="Settings are environment variables KVATLAS_*; ops/README.md lists them.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_relay(commands)
    _add_pool(commands)
    _add_worker(commands)
    _add_router(commands)
    _add_topics(commands)
    _add_replay(commands)
    _add_check(commands)
    _add_doctor(commands)
    _add_engine(commands)
    _add_demo(commands)
    return parser


# ---- services


def _add_relay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    relay = commands.add_parser("relay", help="mirror one engine's cache events into Kafka")
    relay.add_argument("--model", required=True, help="the model's name, revision included where it matters")
    relay.add_argument("--replica", required=True, help="the name that the gateway knows the engine by")
    relay.add_argument("--engine", default="vllm", help="vllm, sglang, trtllm or dynamo (default vllm)")
    relay.add_argument("--engine-version", required=True, help="for example 0.32.0; the dialect depends on it")
    relay.add_argument(
        "--events",
        required=True,
        help="the engine's PUB socket, for example tcp://127.0.0.1:5557, or TensorRT-LLM's HTTP address",
    )
    relay.add_argument("--replay", help="its replay socket; without one gaps cannot be filled")
    relay.add_argument("--ranks", type=int, default=1, help="data-parallel ranks, one port each (default 1)")
    relay.add_argument("--rank", type=int, default=0, help="the first rank's number (default 0)")
    relay.add_argument("--topic", default="", help="the topic that the engine publishes under (default: any)")
    relay.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a fact about the engine that its events do not say; relays/README.md lists them",
    )
    relay.set_defaults(run=_relay, tool=False)


def _relay(arguments: argparse.Namespace, settings: Settings) -> int:
    # each command imports what it runs: all of it takes two seconds, and a restarted process is waited for
    from relays.dialects import EngineSettings
    from relays.process import Relay, RelayConfig, is_http, spread_ranks

    facts = set_values(arguments.set, EngineSettings)
    if not is_http(arguments.events):
        facts = msgspec.structs.replace(facts, transport="zmq")
    if arguments.ranks < 1 or arguments.rank < 0:
        raise ConfigError(f"--ranks {arguments.ranks}, --rank {arguments.rank}: at least one rank, counted from 0")
    config = RelayConfig(
        model=arguments.model,
        replica=arguments.replica,
        engine=arguments.engine,
        version=arguments.engine_version,
        ranks=spread_ranks(arguments.events, arguments.replay, arguments.ranks, first=arguments.rank),
        topic=arguments.topic,
        settings=facts,
    )
    relay = Relay(config, settings, client_options(settings.kafka_brokers, settings.security))
    metrics.serve(settings.metrics_port, settings.metrics_host)

    async def run(stop: asyncio.Event) -> int:
        return await _until(stop, relay.run())

    return _run(run)


def _add_pool(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pool = commands.add_parser("pool", help="mirror a cache that several replicas read into Kafka")
    pool.add_argument("--kind", required=True, help="lmcache (its multiprocess server), llmd or mooncake")
    pool.add_argument("--name", required=True, help="the name by which relays' `pools` setting says who reads it")
    pool.add_argument("--model", required=True, action="append", help="a model whose blocks it holds; may be repeated")
    pool.add_argument(
        "--events",
        required=True,
        action="append",
        help="a publisher's address, for example tcp://127.0.0.1:5560 or grpc://127.0.0.1:50051; may be repeated",
    )
    pool.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="relays/README.md lists them")
    pool.set_defaults(run=_pool, tool=False)


def _pool(arguments: argparse.Namespace, settings: Settings) -> int:
    from relays.dialects import PoolSettings
    from relays.pools.process import PoolConfig, PoolRelay

    config = PoolConfig(
        kind=arguments.kind,
        name=arguments.name,
        models=tuple(arguments.model),
        endpoints=tuple(arguments.events),
        settings=set_values(arguments.set, PoolSettings),
    )
    relay = PoolRelay(config, settings, client_options(settings.kafka_brokers, settings.security))
    metrics.serve(settings.metrics_port, settings.metrics_host)

    async def run(stop: asyncio.Event) -> int:
        return await _until(stop, relay.run())

    return _run(run)


def _add_worker(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    worker = commands.add_parser("worker", help="fold the models' events into Redis (KVATLAS_MODELS)")
    worker.set_defaults(run=_worker, tool=False)


def _worker(arguments: argparse.Namespace, settings: Settings) -> int:
    from streams.worker import Worker  # Faust configures much when it is imported

    metrics.serve(settings.metrics_port, settings.metrics_host)
    return _run(Worker(settings).run)


def _add_router(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    router = commands.add_parser("router", help="price prompts over HTTP")
    router.set_defaults(run=_router, tool=False)


def _router(arguments: argparse.Namespace, settings: Settings) -> int:
    import uvicorn

    from index.redis_store import RedisStore
    from router.app import build_app

    host, port = settings.router_host, settings.router_port
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"KVATLAS_ROUTER_HOST, KVATLAS_ROUTER_PORT: {host}:{port}: {error}") from error
    store = RedisStore.from_urls(listed(settings.redis_url), settings.shards, timeout_s=settings.router_redis_timeout_s)
    app = build_app(store, settings, store.close)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


# ---- administration


def _add_topics(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    topics = commands.add_parser("topics", help="create every topic with its partitions and settings")
    topics.set_defaults(run=_topics, tool=True)


def _topics(arguments: argparse.Namespace, settings: Settings) -> int:
    from streams.topics import create_topics

    specs = topic_specs(listed(settings.models), settings.partitions)

    async def create() -> int:
        reports = await create_topics(settings.kafka_brokers, specs, settings.security)
        for report in reports:
            state = "created" if report.created else "different" if report.differences else "present"
            _print(f"{state:<9} {report.name}")
            for difference in report.differences:
                _print(f"          {difference.setting}: wanted {difference.wanted}, found {difference.found}")
        return 1 if any(report.differences for report in reports) else 0

    async def run(stop: asyncio.Event) -> int:
        return await _until(stop, create(), interrupted=_INTERRUPTED)

    return _run(run)


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser("check-engine", help="say whether an engine's events are what its version promises")
    check.add_argument("--recording", type=Path, metavar="CAPTURE", help="a recording instead of a live engine")
    check.add_argument("--engine", default="vllm", help="vllm or sglang (default vllm)")
    check.add_argument("--engine-version", help="for example 0.32.0 (default: what the recording says)")
    check.add_argument("--events", help="the engine's PUB socket, for example tcp://127.0.0.1:5557")
    check.add_argument("--replay", help="its replay socket")
    check.add_argument("--topic", default="", help="the topic that it publishes under (default: any)")
    check.add_argument("--rank", type=int, default=0, help="the data-parallel rank that publishes there (default 0)")
    check.add_argument("--api", help="its HTTP address; probe prompts are sent there and predicted")
    check.add_argument("--seconds", type=float, default=10.0, help="how long to listen without --api (default 10)")
    check.add_argument("--record", type=Path, metavar="FOLDER", help="keep what was seen, for `kvatlas replay`")
    check.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as for `kvatlas relay`")
    check.add_argument("--json", action="store_true", help="one JSON object")
    check.set_defaults(run=_check, tool=True)


def _check(arguments: argparse.Namespace, settings: Settings) -> int:
    from ops.check.command import check_engine, check_recording
    from ops.check.live import Target
    from relays.dialects import EngineSettings

    if arguments.recording is not None:
        return asyncio.run(check_recording(arguments.recording, arguments.engine_version, as_json=arguments.json))
    if arguments.events is None or arguments.engine_version is None:
        raise ConfigError("check-engine: --events and --engine-version are needed, or --recording")
    if arguments.engine not in ("vllm", "sglang"):
        raise ConfigError(f"check-engine: {arguments.engine!r} cannot be checked; vllm and sglang can")
    target = Target(
        engine=arguments.engine,
        version=arguments.engine_version,
        events=arguments.events,
        replay=arguments.replay,
        topic=arguments.topic,
        rank=arguments.rank,
        api=arguments.api,
        settings=set_values(arguments.set, EngineSettings),
    )
    return asyncio.run(check_engine(target, arguments.seconds, arguments.record, as_json=arguments.json))


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser("doctor", help="check a deployment's wiring and name the first thing that is wrong")
    doctor.add_argument("--model", help="the model (default: each of KVATLAS_MODELS)")
    doctor.add_argument("--router", help="the router's address (default: KVATLAS_ROUTER_HOST and _PORT)")
    doctor.add_argument("--json", action="store_true", help="one JSON list a model")
    doctor.set_defaults(run=_doctor, tool=True)


def _doctor(arguments: argparse.Namespace, settings: Settings) -> int:
    from ops.check.doctor import doctor

    models = [arguments.model] if arguments.model else listed(settings.models)
    if not models:
        raise ConfigError("doctor: --model or KVATLAS_MODELS is needed")
    router = arguments.router or f"http://{settings.router_host}:{settings.router_port}"
    return max(asyncio.run(doctor(model, settings, router, as_json=arguments.json)) for model in models)


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    replay = commands.add_parser("replay", help="replay recordings and compare with the engine's own truth")
    replay.add_argument("captures", nargs="+", type=Path, metavar="CAPTURE", help="folder of a recording")
    replay.add_argument("--stack", action="store_true", help="through relay, Kafka, worker, Redis and router")
    replay.add_argument("--json", action="store_true", help="one JSON object a line and recording")
    replay.set_defaults(run=_replay, tool=True)


def _replay(arguments: argparse.Namespace, settings: Settings) -> int:
    from ops.replay.command import replay_all

    async def run(stop: asyncio.Event) -> int:
        body = replay_all(arguments.captures, stack=arguments.stack, as_json=arguments.json, settings=settings)
        return await _until(stop, body, interrupted=_INTERRUPTED)

    return _run(run)


# ---- trying it out


def _add_engine(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    engine = commands.add_parser("engine", help="run a simulated engine: HTTP, cache events, replay")
    engine.add_argument(
        "--kind",
        choices=("vllm", "sglang", "mooncake"),
        default="vllm",
        help="which engine (default vllm); mooncake: the master of a store that vLLMs share",
    )
    engine.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="ops/simulator/README.md")
    engine.set_defaults(run=_engine, tool=False)


def _engine(arguments: argparse.Namespace, settings: Settings) -> int:
    from ops.simulator.mooncake.server import run_master
    from ops.simulator.mooncake.settings import MasterSettings
    from ops.simulator.server import run_engine
    from ops.simulator.settings import SimulatorSettings
    from ops.simulator.sglang.settings import SglangSettings

    async def run(stop: asyncio.Event) -> int:
        match arguments.kind:
            case "vllm":
                simulated = run_engine(set_values(arguments.set, SimulatorSettings))
            case "sglang":
                simulated = run_engine(set_values(arguments.set, SglangSettings))
            case _:
                simulated = run_master(set_values(arguments.set, MasterSettings))
        return await _until(stop, simulated)

    return _run(run)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser("demo", help="run simulated engines, the whole stack and a client")
    demo.add_argument("--seconds", type=float, default=60.0, help="how long to drive it (default 60)")
    demo.add_argument(
        "--fleet",
        choices=("vllm", "mixed"),
        default="vllm",
        help="three vLLMs (default), or vLLMs with a shared store beside SGLangs with HiCache",
    )
    demo.set_defaults(run=_demo, tool=True)


def _demo(arguments: argparse.Namespace, settings: Settings) -> int:
    from ops.demo.run import run_demo

    async def run(stop: asyncio.Event) -> int:
        return await run_demo(arguments.seconds, arguments.fleet, settings, stop)

    return _run(run)


# ---- helpers


def set_values(pairs: Sequence[str], kind: type[Given]) -> Given:
    """Return a struct from `--set NAME=VALUE` arguments; a value is JSON or a bare word.

    Raises:
        ConfigError: an unknown name, or a value that does not fit; the message names it.
    """
    values: dict[str, object] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"--set {pair!r}: expected NAME=VALUE")
        values[name] = _value_of(name, text, kind)
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from error


def _value_of(name: str, text: str, kind: type[msgspec.Struct]) -> object:
    """Return a value as JSON reads it, or the bare text where a text is wanted: `hash_seed=0` is one."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    try:
        value = msgspec.json.decode(text)
        msgspec.convert(value, types.get(name, object), strict=False)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return text
    return value


async def _until(stop: asyncio.Event, body: Coroutine[Any, Any, int | None], *, interrupted: int = 0) -> int:
    """Run a body until it ends or is told to stop; return its exit code, or that of an interrupted one."""
    running, stopping = asyncio.create_task(body), asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    ended = running.done()
    running.cancel()
    stopping.cancel()
    await asyncio.gather(running, stopping, return_exceptions=True)
    if not running.cancelled() and (error := running.exception()) is not None:
        raise error
    return running.result() or 0 if ended else interrupted


def _run(body: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run a coroutine that stops when its event is set by SIGINT or SIGTERM."""

    async def run() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        return await body(stop)

    return asyncio.run(run())


def _print(line: str) -> None:
    print(line)  # noqa: T201


if __name__ == "__main__":
    main()
