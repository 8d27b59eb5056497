"""What a vLLM recording says: its steps, its profile and its tables."""

import hashlib
from typing import Any

import pytest

from ops.replay.capture import Capture, Frame
from ops.replay.vllm import profile_of, steps_of, table_digest
from relays.dialects import EngineSettings, vllm_profile
from schemas.errors import ConfigError
from schemas.profiles import Group, TierProfile


def capture(*log: dict[str, Any], frames: tuple[Frame, ...] = (), **meta: Any) -> Capture:
    meta.setdefault("vllm_version", "0.32.0")
    return Capture("c", "vllm", meta["vllm_version"], meta, frames, log)


def submit(rid: str, **fields: Any) -> dict[str, Any]:
    return {"ev": "submit", "rid": rid, "prompt_token_ids": [1, 2, 3], **fields}


def scheduled(rid: str, step: int, cached: int = 0) -> dict[str, Any]:
    return {"ev": "scheduled", "rid": rid, "step": step, "num_cached_tokens": cached}


def test_requests_stand_in_the_step_that_decided_them() -> None:
    """A request carries what it asked for and what it got; when it was decided twice the last time counts."""
    steps = steps_of(
        capture(
            submit("a", cache_salt="t", lora={"name": "alpha", "id": 1}),
            submit("b"),
            scheduled("a", 1),
            scheduled("b", 1),
            scheduled("a", 2, 32),
            {"ev": "step", "n": 1, "digest": "x"},
        )
    )
    assert [(step.number, [request.rid for request in step.requests]) for step in steps] == [(1, ["b"]), (2, ["a"])]
    (request,) = steps[1].requests
    assert (request.tokens, request.delivered_tokens) == ((1, 2, 3), 32)
    assert (request.salt, request.adapter) == ("t", "alpha")
    assert steps[0].truth == {"ev": "step", "n": 1, "digest": "x"}


def test_a_prompt_with_images_is_the_expanded_one() -> None:
    """Placeholders and the images' places come from the log's own entry."""
    feature = {"identifier": "img", "offset": 1, "length": 2}
    log = [submit("a"), {"ev": "mm", "rid": "a", "expanded_token_ids": [1, 9, 9], "features": [feature]}]
    (step,) = steps_of(capture(*log, scheduled("a", 1)))
    assert step.requests[0].tokens == (1, 9, 9)
    assert step.requests[0].media == (("img", 1, 2),)


def test_a_reset_belongs_to_the_next_step_and_only_when_accepted() -> None:
    """A reset that the engine refused did not happen."""
    refused = {"ev": "reset_prefix_cache", "returned": False}
    accepted = {"ev": "reset_prefix_cache", "returned": True, "kw": {"reset_connector": True}}
    steps = steps_of(capture(refused, accepted, submit("a"), scheduled("a", 4), {"ev": "step", "n": 4}))
    assert [(step.number, step.resets) for step in steps] == [(4, [{"reset_connector": True}])]


def test_published_messages_stand_in_their_step() -> None:
    """Replayed messages are no news of a step."""
    frames = (Frame(0, 2, "pub", ()), Frame(1, 2, "replay", ()))
    (step,) = steps_of(capture(frames=frames))
    assert [frame.number for frame in step.frames] == [0]


def test_an_entry_without_what_its_kind_has_is_named() -> None:
    """The error says which entry of the log lacks what; kinds that nobody knows are passed over."""
    with pytest.raises(ConfigError, match=r"c: log entry 2: KeyError\('num_cached_tokens'\)"):
        steps_of(capture({"ev": "novelty"}, {"ev": "scheduled", "rid": "a", "step": 1}))
    assert steps_of(capture({"ev": "novelty"}, {})) == []


def test_the_profile_is_what_an_operator_would_have_configured() -> None:
    """Groups, capacity in chunks, seed, adapters and drafting come from the engine's own arguments."""
    config = "{'kv_connector': 'OffloadingConnector', 'cpu_bytes_to_use': 98304, 'blocks_per_chunk': 3}"
    recording = capture(
        submit("a", lora={"name": "alpha", "id": 7}),
        engine_args={"kv_transfer_config": config, "speculative_config": {"method": "eagle"}},
        kv_cache_groups=[
            {"spec": "FullAttentionSpec", "block_size": 32, "sliding_window": None, "layers": ["a", "b"]},
            {"spec": "SlidingWindowSpec", "block_size": 32, "sliding_window": 96, "layers": ["c", "d"]},
        ],
        model_config={"num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2, "torch_dtype": "float32"},
        block_size=32,
        env={"PYTHONHASHSEED": "0"},
        hash_algo="sha256_cbor",
    )
    profile = profile_of(recording)
    assert profile.groups == (Group(0, "full", 32), Group(1, "window", 32, 96))
    # a block has 2 (keys, values) x 1 x 32 x 4 bytes x 2 layers x 32 tokens = 16 KiB, a chunk three of them
    assert profile.tier("host") == TierProfile("host", chunk=3, capacity=2, last_token="counted", drafting=True)
    assert (profile.hash.algorithm, profile.hash.seed, profile.hash.bits) == ("sha256_cbor", "0", 64)
    assert (profile.adapters, profile.drafting) == ({"7": "alpha"}, "drop_unit_ahead")


def test_a_plain_recording_has_a_plain_profile() -> None:
    """Without connector, drafting and groups the profile is the dialect's default."""
    assert profile_of(capture()).tiers == vllm_profile("m", "c", "0.32.0", EngineSettings()).tiers
    assert profile_of(capture()).hash.seed == "vllm-none-hash"


def test_a_table_digest_is_over_distinct_sorted_lines() -> None:
    """The digest is SHA-256 over sorted `group:hash` lines, bytes in hex, repeats left out."""
    expected = hashlib.sha256(b"0:11\n1:7\n1:ff00").hexdigest()[:16]
    assert table_digest([(1, 7), (0, 11), (1, b"\xff\x00"), (1, 7)]) == expected
