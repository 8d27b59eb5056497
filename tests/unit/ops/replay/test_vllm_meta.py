"""What meta.json tells of an engine: every form that a version's configuration has."""

from typing import Any

import pytest

from ops.replay.capture import Capture
from ops.replay.vllm_meta import settings_of
from relays.dialects import EngineSettings
from schemas.profiles import Group


def told(*log: dict[str, Any], version: str = "0.32.0", **meta: Any) -> EngineSettings:
    return settings_of(Capture("c", "vllm", version, meta, (), log))


def spec(name: str, block_size: int | None = 32, window: int | None = None, layers: int = 2) -> dict[str, Any]:
    return {"spec": name, "block_size": block_size, "sliding_window": window, "layers": ["l"] * layers}


MODEL = {"num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2, "torch_dtype": "float32"}
FULL = spec("FullAttentionSpec")
# 2 (keys, values) x 1 x 32 x 4 bytes x 2 layers x 32 tokens
BLOCK_BYTES = 16384

HOSTS = [
    ("{'kv_connector': 'OffloadingConnector', 'cpu_bytes_to_use': 163840}", {}, ("offloading", 10, 1)),
    ('{"kv_connector": "OffloadingConnector", "cpu_bytes_to_use": 1.6384e5}', {}, ("offloading", 10, 1)),
    ("kv_connector='OffloadingConnector', {'num_cpu_blocks': 7, 'block_size': 96}", {}, ("offloading", 7, 3)),
    ("kv_connector='OffloadingConnector', {'cpu_bytes_to_use': 163840, 'block_size': 64}", {}, ("offloading", 5, 2)),
    ("kv_connector='SimpleCPUOffloadConnector', {'cpu_bytes_to_use': 163840}", {}, ("simple_cpu", 10, 1)),
    ("kv_connector='NixlConnector', {}", {}, ("none", None, 1)),
    (None, {"kv_offloading_size": 1}, ("offloading", (1 << 30) // BLOCK_BYTES, 1)),
    (None, {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, ("none", None, 1)),
    (None, {}, ("none", None, 1)),
]


@pytest.mark.parametrize(("config", "arguments", "host"), HOSTS)
def test_the_host_tier_is_read_from_any_form_of_its_configuration(
    config: str | None, arguments: dict[str, Any], host: tuple[str, int | None, int]
) -> None:
    """Bytes or blocks, tokens or blocks of a chunk, a connector's configuration or vLLM's short one."""
    settings = told(
        engine_args={"kv_transfer_config": config, **arguments},
        model_config=MODEL,
        kv_cache_groups=[FULL],
        block_size=32,
    )
    assert (settings.connector, settings.host_chunks, settings.blocks_per_chunk) == host


CAPACITIES = [
    ({"dtype": "bfloat16"}, MODEL, [FULL], 20),
    ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, MODEL, [FULL], 40),
    ({"kv_cache_dtype": "something_new"}, MODEL, [FULL], None),  # a wrong capacity would prove clears that never were
    ({}, {**MODEL, "kv_lora_rank": 24, "qk_rope_head_dim": 8}, [spec("MLAAttentionSpec")], 20),
    # groups of layers share their pages
    ({}, MODEL, [FULL, spec("SlidingWindowSpec", 32, 96, layers=4)], 5),
    ({}, {**MODEL, "head_dim": None, "hidden_size": 64, "num_attention_heads": 2}, [FULL], 10),
    ({}, {}, [FULL], None),
]


@pytest.mark.parametrize(("arguments", "model", "groups", "chunks"), CAPACITIES)
def test_a_host_tiers_capacity_is_its_bytes_over_a_blocks(
    arguments: dict[str, Any], model: dict[str, Any], groups: list[Any], chunks: int | None
) -> None:
    """A block has one page for each layer of the largest group; what is not known gives no capacity."""
    config = "'OffloadingConnector' 'cpu_bytes_to_use': 163840"
    settings = told(
        engine_args={"kv_transfer_config": config, **arguments},
        model_config=model,
        kv_cache_groups=groups,
        block_size=32,
    )
    assert settings.host_chunks == chunks


def test_groups_without_a_rule_are_left_to_the_events() -> None:
    """Specs that are not known, or that lack what their kind needs, are not declared: declared ones must be stored."""
    settings = told(
        kv_cache_groups=[
            spec("ChunkedLocalAttentionSpec"),
            spec("UniformTypeKVCacheSpecs"),
            spec("UniformTypeKVCacheSpecs", window=64),
            spec("SlidingWindowSpec"),
            spec("MambaSpec", 128),
            spec("FullAttentionSpec", None),
            {},
        ]
    )
    assert settings.groups == (Group(1, "full", 32), Group(2, "window", 32, 64), Group(4, "state", 128))


DRAFTS = [
    ("0.12.0", {"method": "eagle3"}, True),
    ("0.28.0", {"method": "deepseek_mtp"}, True),
    ("0.28.0", {"model": "some/EAGLE-head"}, True),
    ("0.19.1", {"method": "dflash"}, False),
    ("0.22.1", {"method": "dflash"}, True),
    ("0.24.0", {"method": "dspark"}, False),
    ("0.25.1", {"method": "dspark"}, True),
    ("0.32.0", {"method": "ngram"}, False),
    ("0.32.0", {"method": "eagle", "disable_eagle_block_drop": True}, False),
    ("0.32.0", None, False),
]


@pytest.mark.parametrize(("version", "speculative", "drops"), DRAFTS)
def test_only_some_speculation_drops_a_block(version: str, speculative: dict[str, Any] | None, drops: bool) -> None:
    """Methods that draft from the target's hidden states do; which ones those are depends on the version."""
    settings = told(version=version, engine_args={"speculative_config": speculative})
    assert settings.drafting == ("eagle" if drops else "none")


def test_what_meta_leaves_out_is_the_dialects_default() -> None:
    """Missing and null keys are the same, and log entries of unknown kinds are passed over."""
    assert told() == told(env=None, engine_args=None, kv_cache_groups=None, adapters=None) == EngineSettings()
    assert told({"ev": "novelty", "lora": 7, "extra_args": []}) == EngineSettings()
