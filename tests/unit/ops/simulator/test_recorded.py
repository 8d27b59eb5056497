"""The simulated engine beside recorded ones: hashes, payloads, and all that they did."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ops.replay.capture import Capture, load_capture
from ops.replay.vllm import table_digest
from ops.simulator.block_pool import BlockPool
from ops.simulator.chain import DEFAULT_SEED, Adapter, Chain, HashScheme, announced, root_of
from ops.simulator.dialect import dialect_of
from ops.simulator.engine import Engine, Limits, Request
from ops.simulator.wire import encode_batch
from schemas.batches import Batch
from schemas.vllm import ArrayEvent, BlockStored, Event
from tests.support.captures import SHORT, recording_of


@pytest.mark.parametrize("name", ["0.14.1-salt-lora", "0.32.0-salt-lora", "0.32.0-mm-llava"])
def test_a_recorded_batch_is_written_byte_for_byte(name: str) -> None:
    capture = load_capture(SHORT / name)
    for payload, batch, events in batches(capture):
        rank = batch.data_parallel_rank
        assert rank is not None
        assert encode_batch(batch.ts, events, rank, dialect_of(capture.version)) == payload


@pytest.mark.parametrize("name", ["0.14.1-salt-lora", "0.32.0-salt-lora"])
def test_recorded_hashes_of_prompts_with_and_without_salt_are_recomputed(name: str) -> None:
    """Those of adapters are left out: from 0.31 on they need the adapter's path, which no recording tells."""
    capture = load_capture(SHORT / name)
    size = capture.meta["block_size"]
    scheme = HashScheme(root_of(capture.meta["env"]["PYTHONHASHSEED"]), size, dialect_of(capture.version).tagged_keys)
    outputs = {entry["rid"]: entry["output_token_ids"] for entry in capture.log if entry["ev"] == "finish"}
    submits = [entry for entry in capture.log if entry["ev"] == "submit"]
    ours = {
        announced(block_hash)
        for entry in submits
        for block_hash in Chain(
            scheme, entry["prompt_token_ids"] + outputs[entry["rid"]], salt=entry.get("cache_salt")
        ).hashes
    }
    stored = [event for _, _, events in batches(capture) for event in events if isinstance(event, BlockStored)]
    theirs = {block_hash for event in stored if event.lora_name is None for block_hash in event.block_hashes}
    assert theirs
    assert theirs <= ours


@pytest.mark.parametrize(
    "name",
    ["0.12.0-plain", "0.14.1-plain", "0.14.1-salt-lora", "0.25.1-plain", "0.32.0-plain", "0.32.0-plain-noseed"],
)
def test_a_recorded_engine_and_the_simulated_one_write_the_same_bytes(name: str) -> None:
    """Hits, duplicates, evictions, preemptions, aborts and resets happen as in the real engine."""
    capture = load_capture(recording_of("vllm", name))
    engine = _recorded_engine(capture)
    published = {frame.step: frame.parts[2] for frame in capture.published}
    cached = {entry["rid"]: entry["num_cached_tokens"] for entry in capture.log if entry["ev"] == "scheduled"}
    outputs = {entry["rid"]: entry["output_token_ids"] for entry in capture.log if entry["ev"] == "finish"}
    finished: dict[str, int] = {}
    for entry in capture.log:
        match entry["ev"]:
            case "submit":
                engine.submit(_recorded_request(entry, outputs))
            case "abort":
                engine.abort(entry["rid"])
            case "reset_prefix_cache":
                assert engine.reset_prefix_cache() == entry["returned"]
            case "step":
                outcome = engine.step()
                finished |= {done.request.id: done.cached_tokens for done in outcome.finished}
                payload = published.get(entry["n"])
                if payload is None:
                    assert not outcome.events
                else:
                    time_s = msgspec.msgpack.decode(payload)[0]
                    assert encode_batch(time_s, outcome.events, 0, dialect_of(capture.version)) == payload
                _compare_with_truth(engine, entry)
    assert finished == {rid: tokens for rid, tokens in cached.items() if rid in outputs}


def _recorded_engine(capture: Capture) -> Engine:
    meta, dialect = capture.meta, dialect_of(capture.version)
    scheme = HashScheme(
        root_of(meta["env"].get("PYTHONHASHSEED") or DEFAULT_SEED), meta["block_size"], dialect.tagged_keys
    )
    arguments = meta["engine_args"]
    limits = Limits(arguments["max_num_seqs"], arguments["max_num_batched_tokens"], arguments["max_model_len"])
    pool = BlockPool(meta["num_gpu_blocks"], meta["block_size"], unhashed_first=dialect.unhashed_first)
    return Engine(pool, scheme, dialect, limits)


def _recorded_request(entry: dict[str, Any], outputs: dict[str, list[int]]) -> Request:
    lora = entry.get("lora")
    return Request(
        entry["rid"],
        entry["prompt_token_ids"],
        outputs.get(entry["rid"]) or [0] * entry["max_tokens"],  # aborted: what it generated is not known
        Adapter(lora["name"], lora["id"], "") if lora else None,
        entry.get("cache_salt"),
    )


def _compare_with_truth(engine: Engine, step: dict[str, Any]) -> None:
    table = engine.pool.table()
    assert table_digest((0, block_hash) for block_hash in table) == step["digest"]
    assert sum(table.values()) == step["cached_blocks"]
    assert engine.pool.free_blocks == step["free_blocks"]
    assert (engine.running, engine.waiting) == (step["running"], step["waiting"])


def batches(capture: Capture) -> Iterator[tuple[bytes, Batch, list[Event]]]:
    """Yield each published payload, decoded."""
    kind = Event if dialect_of(capture.version).event_maps else ArrayEvent
    decode_events = msgspec.msgpack.Decoder(kind).decode
    for frame in capture.published:
        batch = msgspec.msgpack.decode(frame.parts[2], type=Batch)
        yield frame.parts[2], batch, [decode_events(raw) for raw in batch.events]
