"""What an operator of a recorded vLLM would have set, as far as the recording's meta.json and log tell."""

import re
from collections.abc import Sequence
from typing import Any

from ops.replay.capture import Capture
from relays.dialects import Connector, EngineSettings, parse_version
from schemas.profiles import Group, GroupKind

# groups of any other spec are left to the events, which name a kind that has a rule, or one that has none
_SPECS: dict[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "TQFullAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "MambaSpec": "state",
}
_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def settings_of(capture: Capture) -> EngineSettings:
    """Return what an operator of this engine would have set."""
    meta = capture.meta
    arguments = meta.get("engine_args") or {}
    env = meta.get("env") or {}
    connector, chunks, per_chunk = _host_tier(meta, arguments)
    submits = [entry for entry in capture.log if entry.get("ev") == "submit"]
    modes = [(entry.get("extra_args") or {}).get("kv_cache_report_mode") for entry in submits]
    return EngineSettings(
        block_size=meta.get("block_size") or 0,
        groups=_groups(meta),
        prefix_match_unit=meta.get("cache_config.prefix_match_unit") or arguments.get("prefix_match_unit") or 0,
        drafting="eagle" if _drafts(arguments.get("speculative_config"), capture.version) else "none",
        connector=connector,
        host_chunks=chunks,
        blocks_per_chunk=per_chunk,
        hash_algorithm=meta.get("hash_algo") or "sha256",
        hash_seed=env.get("PYTHONHASHSEED"),
        hash_bits=256 if env.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES") == "0" else 64,
        report_mode_full="full" in modes,
        adapters=_adapters(meta, submits),
    )


def _groups(meta: dict[str, Any]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for index, group in enumerate(meta.get("kv_cache_groups") or ()):
        spec, window, block_size = group.get("spec"), group.get("sliding_window"), group.get("block_size")
        kind = _SPECS.get(spec)
        if spec == "UniformTypeKVCacheSpecs":
            kind = "window" if window else "full"
        if kind is not None and block_size and (window or kind != "window"):
            groups.append(Group(index, kind, block_size, window if kind == "window" else None))
    return tuple(groups)


def _host_tier(meta: dict[str, Any], arguments: dict[str, Any]) -> tuple[Connector, int | None, int]:
    """Return the connector, the host tier's capacity in chunks (None: not known) and the blocks of a chunk.

    Source: v1/kv_offload/cpu.py 0.12.0 (num_cpu_blocks) and 0.14.1, v1/kv_offload/cpu/spec.py 0.22.1 to 0.32.0,
    offloading/config.py 0.28.0 (blocks_per_chunk), config/vllm.py (kv_offloading_size).
    """
    text = str(arguments.get("kv_transfer_config") or "")
    size = arguments.get("kv_offloading_size")
    if size and arguments.get("kv_offloading_backend", "native") == "native":
        text = f"'OffloadingConnector' 'cpu_bytes_to_use': {int(size * (1 << 30))}"
    if "SimpleCPUOffloadConnector" in text:
        connector: Connector = "simple_cpu"
    elif "OffloadingConnector" in text:
        connector = "offloading"
    else:
        return "none", None, 1
    block_size = meta.get("block_size") or 0
    per_chunk = _number(text, "blocks_per_chunk") or 1
    chunk_tokens = _number(text, "block_size")
    if chunk_tokens and block_size:
        per_chunk = chunk_tokens // block_size
    chunks = _number(text, "num_cpu_blocks")
    size_bytes = _number(text, "cpu_bytes_to_use")
    block_bytes = _block_bytes(meta, arguments)
    if not chunks and size_bytes and block_bytes:
        chunks = size_bytes // (block_bytes * per_chunk)
    return connector, chunks, per_chunk


def _number(text: str, key: str) -> int | None:
    found = re.search(rf"""['"]{key}['"]: ?([\d.]+(?:e\+?\d+)?)""", text)
    return int(float(found.group(1))) if found else None


def _block_bytes(meta: dict[str, Any], arguments: dict[str, Any]) -> int | None:
    """Return the bytes of one block: its layers' pages, of which groups of layers share theirs; None: not known."""
    model = meta.get("model_config") or {}
    groups = meta.get("kv_cache_groups") or ()
    layers = max((len(group.get("layers") or ()) for group in groups), default=0)
    if not layers and len(groups) <= 1:
        layers = model.get("num_hidden_layers") or 0
    stored = arguments.get("kv_cache_dtype") or "auto"
    dtype = stored if stored != "auto" else arguments.get("dtype") or model.get("torch_dtype") or ""
    value_bytes = _DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 0)
    attention = next((group for group in groups if group.get("spec") != "MambaSpec"), meta)
    return _values_of_a_token(model) * value_bytes * layers * (attention.get("block_size") or 0) or None


def _values_of_a_token(model: dict[str, Any]) -> int:
    """Return how many numbers one layer keeps of a token: keys and values, or MLA's latent; 0: not known."""
    if model.get("kv_lora_rank"):
        return int(model["kv_lora_rank"] + model.get("qk_rope_head_dim", 0))
    heads = model.get("num_key_value_heads") or model.get("num_attention_heads") or 0
    attention_heads = model.get("num_attention_heads") or 1
    width = model.get("head_dim") or (model.get("hidden_size") or 0) // attention_heads
    return int(2 * heads * width)


def _drafts(speculative: object, version: str) -> bool:
    """Return whether this speculation makes hits lose their last block (config/speculative.py use_eagle)."""
    if not isinstance(speculative, dict) or speculative.get("disable_eagle_block_drop"):
        return False
    method = speculative.get("method") or str(speculative.get("model") or "").lower()
    since = {"dflash": (0, 20), "dspark": (0, 25)}.get(method)
    if since is not None:
        return parse_version(version) >= since
    return "eagle" in method or "mtp" in method


def _adapters(meta: dict[str, Any], submits: Sequence[dict[str, Any]]) -> dict[str, str]:
    adapters = {str(key): name for key, name in (meta.get("adapters") or {}).items()}
    for entry in submits:
        adapter = entry.get("lora")
        if adapter:
            adapters.setdefault(str(adapter["id"]), adapter["name"])
    return adapters
