"""vLLM recordings: their profile, their truth step by step, and what no observer could have known."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from index.hashing import Media
from ops.replay.capture import MODEL, Capture, Frame
from relays.dialects import Connector, EngineSettings, vllm_profile
from relays.engine_events import EngineHash
from schemas.profiles import Group, GroupKind, Profile

_SPECS: dict[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "MambaSpec": "state",
}


class Request(msgspec.Struct):
    """One prompt that the engine scheduled, and what it then reused."""

    rid: str
    step: int
    tokens: tuple[int, ...] | None  # None: given as embeddings
    delivered_tokens: int
    salt: str | None = None
    adapter: str | None = None
    media: tuple[Media, ...] = ()

    @property
    def namespace(self) -> tuple[object, ...]:
        """Return what must be equal beside the tokens."""
        return (self.salt, self.adapter, self.media)


class Step(msgspec.Struct):
    """One engine step: what happened before it, who was scheduled in it, what it published, what was true after."""

    number: int
    resets: list[dict[str, Any]] = []  # accepted resets before this step, with their arguments
    requests: list[Request] = []  # in the order decided
    frames: list[Frame] = []
    truth: dict[str, Any] | None = None  # the `step` entry


def steps_of(capture: Capture) -> list[Step]:
    """Return the recording's steps in order."""
    steps: dict[int, Step] = {}

    def step(number: int) -> Step:
        return steps.setdefault(number, Step(number))

    requests: dict[str, Request] = {}
    submits: dict[str, dict[str, Any]] = {}
    media: dict[str, dict[str, Any]] = {}
    resets: list[dict[str, Any]] = []
    for entry in capture.log:
        match entry["ev"]:
            case "submit":
                submits[entry["rid"]] = entry
            case "mm":
                media[entry["rid"]] = entry
            case "reset_prefix_cache" if entry.get("returned"):
                resets.append(entry.get("kw") or {})
            case "scheduled":
                rid = entry["rid"]
                requests.pop(rid, None)  # the last decision counts, in its own order
                requests[rid] = _request(entry, submits.get(rid, {}), media.get(rid))
                if resets:
                    step(entry["step"]).resets += resets
                    resets = []
            case "step":
                step(entry["n"]).truth = entry
                if resets:
                    step(entry["n"]).resets += resets
                    resets = []
    for request in requests.values():
        step(request.step).requests.append(request)
    for frame in capture.published:
        step(frame.step).frames.append(frame)
    return [steps[number] for number in sorted(steps)]


def profile_of(capture: Capture) -> Profile:
    """Return the profile that an operator of this engine would have configured."""
    return vllm_profile(MODEL, capture.name, capture.version, settings_of(capture))


def settings_of(capture: Capture) -> EngineSettings:
    """Return what an operator of this engine would have set."""
    meta = capture.meta
    arguments = meta.get("engine_args", {})
    connector, chunks, per_chunk = _host_tier(meta)
    modes = [(entry.get("extra_args") or {}).get("kv_cache_report_mode") for entry in capture.log]
    return EngineSettings(
        block_size=meta.get("block_size") or 0,
        groups=_groups(meta),
        prefix_match_unit=meta.get("cache_config.prefix_match_unit") or 0,
        drafting="eagle" if _drafts(arguments) else "none",
        connector=connector,
        host_chunks=chunks,
        blocks_per_chunk=per_chunk,
        hash_algorithm=meta.get("hash_algo") or "sha256",
        hash_seed=meta.get("env", {}).get("PYTHONHASHSEED"),
        hash_bits=256 if meta.get("env", {}).get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES") == "0" else 64,
        report_mode_full="full" in modes,
        adapters=_adapters(capture),
    )


def table_digest(table: Iterable[tuple[int, EngineHash]]) -> str:
    """Return the digest that the recordings log of an engine's table: distinct (group, hash) pairs."""
    lines = sorted(f"{group}:{name if isinstance(name, int) else name.hex()}" for group, name in set(table))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _request(scheduled: dict[str, Any], submit: dict[str, Any], media: dict[str, Any] | None) -> Request:
    tokens: Sequence[int] | None = submit.get("prompt_token_ids")
    spans: tuple[Media, ...] = ()
    if media is not None:
        tokens = media["expanded_token_ids"]
        spans = tuple(Media(f["identifier"], f["offset"], f["length"]) for f in media["features"])
    adapter = submit.get("lora") or {}
    return Request(
        rid=scheduled["rid"],
        step=scheduled["step"],
        tokens=None if tokens is None else tuple(tokens),
        delivered_tokens=scheduled["num_cached_tokens"],
        salt=submit.get("cache_salt"),
        adapter=adapter.get("name"),
        media=spans,
    )


def _groups(meta: dict[str, Any]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for index, group in enumerate(meta.get("kv_cache_groups", [])):
        kind = _SPECS.get(group["spec"], "full")
        groups.append(Group(index, kind, group["block_size"], group["sliding_window"] if kind == "window" else None))
    return tuple(groups)


def _host_tier(meta: dict[str, Any]) -> tuple[Connector, int | None, int]:
    """Return the connector, the host tier's capacity in chunks and the blocks of a chunk."""
    text = str(meta.get("engine_args", {}).get("kv_transfer_config") or "")
    if not text:
        return "none", None, 1
    connector: Connector = "simple_cpu" if "SimpleCPUOffloadConnector" in text else "offloading"
    found = re.search(r"'blocks_per_chunk': (\d+)", text)
    per_chunk = int(found.group(1)) if found else 1
    size = re.search(r"'cpu_bytes_to_use': (\d+)", text)
    block_bytes = _block_bytes(meta)
    chunks = int(size.group(1)) // (block_bytes * per_chunk) if size and block_bytes else None
    return connector, chunks, per_chunk


def _block_bytes(meta: dict[str, Any]) -> int:
    """Return the bytes of one block over all layers (keys and values of fp32 attention)."""
    model = meta.get("model_config", {})
    try:
        per_token = 2 * model["num_key_value_heads"] * model["head_dim"] * 4 * model["num_hidden_layers"]
    except KeyError:
        return 0
    return int(per_token * meta["block_size"])


def _drafts(arguments: dict[str, Any]) -> bool:
    method = (arguments.get("speculative_config") or {}).get("method", "")
    return "eagle" in method or "mtp" in method


def _adapters(capture: Capture) -> dict[str, str]:
    adapters = {str(key): name for key, name in (capture.meta.get("adapters") or {}).items()}
    for entry in capture.log:
        adapter = entry.get("lora")
        if adapter:
            adapters.setdefault(str(adapter["id"]), adapter["name"])
    return adapters
