"""The fleets of the demo: which engines run, what they share, and what their relays are told of them."""

import itertools
from typing import Any, Literal

import msgspec
import orjson

from ops.embedded.processes import LOOPBACK, free_ports

MODEL = "demo/simulated-8b"
FleetName = Literal["vllm", "mixed"]

_BLOCK_SIZE = 32
_PREFILL_TOKENS_PER_S = 60_000  # of an engine: a cache then turns over in seconds, not in less than an event takes
_VLLM, _SGLANG = "0.32.0", "0.5.23"
_STORE = "store"


class Engine(msgspec.Struct, frozen=True):
    """One simulated engine, and the arguments of the processes that it needs."""

    name: str  # of the replica
    kind: Literal["vllm", "sglang"]
    url: str
    arguments: list[str]  # of `kvatlas`
    relay: list[str]  # of `kvatlas`


class Pool(msgspec.Struct, frozen=True):
    """What the engines share, and the arguments of the processes that it needs."""

    name: str
    arguments: list[str]  # of `kvatlas`
    relay: list[str]  # of `kvatlas`


class Fleet(msgspec.Struct, frozen=True):
    """All engines of the one model."""

    engines: list[Engine]
    pool: Pool | None = None

    @property
    def holders(self) -> list[str]:
        """Return the names by which `GET /v1/replicas` lists them."""
        return [f"{engine.name}/0" for engine in self.engines] + ([f"{self.pool.name}/None"] if self.pool else [])

    @property
    def parts(self) -> dict[str, list[str]]:
        """Return the arguments of every process by its name."""
        members: list[Engine | Pool] = [*self.engines, *([self.pool] if self.pool else [])]
        return {
            name: arguments
            for member in members
            for name, arguments in ((member.name, member.arguments), (f"relay-{member.name}", member.relay))
        }

    def __str__(self) -> str:
        """Say what it is made of."""
        kinds = [engine.kind for engine in self.engines]
        names = {"vllm": "vLLM", "sglang": "SGLang"}
        text = " and ".join(f"{kinds.count(kind)} simulated {name}" for kind, name in names.items() if kind in kinds)
        return text + (", a simulated Mooncake store" if self.pool else "")


def fleet_of(name: FleetName) -> Fleet:
    """Return a fleet, on ports that are free now.

    `vllm`: three vLLMs. `mixed`: two vLLMs that share a Mooncake store, and two SGLangs with a host tier (HiCache); the
    devices are small, so that the other tiers matter.
    """
    if name == "vllm":
        return Fleet([_vllm(f"engine-{number}", 16_384) for number in range(3)])
    rpc, events = (f"tcp://{LOOPBACK}:{port}" for port in free_ports(2))
    vllms = [_vllm(f"vllm-{number}", 4096, store=rpc) for number in range(2)]
    return Fleet([*vllms, *(_sglang(f"sglang-{number}") for number in range(2))], _mooncake(rpc, events))


def _vllm(name: str, blocks: int, store: str = "") -> Engine:
    facts = {"block_size": _BLOCK_SIZE} | ({"pools": [{"name": _STORE}]} if store else {})
    return _engine(name, "vllm", _VLLM, {"block_size": _BLOCK_SIZE, "blocks": blocks, "store": store}, facts)


def _sglang(name: str) -> Engine:
    cache = {"page_size": _BLOCK_SIZE, "pages": 4096, "host_pages": 16_384}
    return _engine(name, "sglang", _SGLANG, cache, {"block_size": _BLOCK_SIZE, "hicache": True})


def _engine(
    name: str, kind: Literal["vllm", "sglang"], version: str, cache: dict[str, Any], facts: dict[str, Any]
) -> Engine:
    http, events, replay = free_ports(3)
    settings = {
        "name": name,
        "model": MODEL,
        "version": version,
        "prefill_tokens_per_s": _PREFILL_TOKENS_PER_S,
        "http_port": http,
        "events_port": events,
        "replay_port": replay,
        **cache,
    }
    relay = [
        *("relay", "--model", MODEL, "--replica", name, "--engine", kind, "--engine-version", version),
        *("--events", f"tcp://{LOOPBACK}:{events}", "--replay", f"tcp://{LOOPBACK}:{replay}"),
        *_set(facts),
    ]
    return Engine(name, kind, f"http://{LOOPBACK}:{http}", ["engine", "--kind", kind, *_set(settings)], relay)


def _mooncake(rpc: str, events: str) -> Pool:
    """Return the master, whose blocks both sides name by vLLM's hashes: sha256 from the default seed."""
    ports = {"rpc_port": rpc.rpartition(":")[2], "events_port": events.rpartition(":")[2]}
    settings = {"name": _STORE, "objects": 65_536, **ports}
    relay = [
        *("pool", "--kind", "mooncake", "--name", _STORE, "--model", MODEL, "--events", events),
        *_set({"block_size": _BLOCK_SIZE}),
    ]
    return Pool(_STORE, ["engine", "--kind", "mooncake", *_set(settings)], relay)


def _set(values: dict[str, Any]) -> list[str]:
    """Return values as arguments `--set NAME=VALUE`."""
    pairs = (
        (name, value if isinstance(value, str) else orjson.dumps(value).decode()) for name, value in values.items()
    )
    return list(itertools.chain.from_iterable(("--set", f"{name}={value}") for name, value in pairs))
