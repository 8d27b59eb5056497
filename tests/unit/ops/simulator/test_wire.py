"""The simulated engine's payloads, by version."""

from typing import Any

import msgspec
import pytest

from ops.simulator.dialect import dialect_of
from ops.simulator.wire import encode_batch
from relays.vllm import Source, decode_payload
from schemas.errors import ConfigError
from schemas.vllm import AllBlocksCleared, BlockRemoved, BlockStored

STORED = BlockStored(
    block_hashes=[1 << 63],
    parent_block_hash=None,
    token_ids=[1, 2],
    block_size=2,
    medium="GPU",
    extra_keys=[["s"]],
    group_idx=0,
    kv_cache_spec_kind="full_attention",
)
REMOVED = BlockRemoved(block_hashes=[5], medium="GPU", group_idx=0)


def encoded(version: str) -> list[Any]:
    payload = encode_batch(1.5, [AllBlocksCleared(), REMOVED, STORED], 3, dialect_of(version))
    batch = msgspec.msgpack.decode(payload)
    assert [batch[0], batch[2]] == [1.5, 3]
    events: list[Any] = batch[1]
    return events


@pytest.mark.parametrize(
    ("version", "removed", "stored"),
    [("0.12.0", 3, 7), ("0.14.1", 3, 8), ("0.18.1", 3, 9), ("0.20.2", 4, 10), ("0.22.1", 4, 11)],
)
def test_up_to_0_23_events_are_arrays_of_the_versions_length(version: str, removed: int, stored: int) -> None:
    events = encoded(version)
    assert events[0] == ["AllBlocksCleared"]
    assert [len(events[1]), len(events[2])] == [removed, stored]


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1", "0.28.0", "0.32.0", "0.40.0"])
def test_from_0_24_on_events_are_maps_in_vllms_order(version: str) -> None:
    cleared, removed, stored = encoded(version)
    assert cleared == {"type": "AllBlocksCleared"}
    assert list(removed) == ["type", "block_hashes", "medium", "group_idx"]
    assert list(stored) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind",
    ]  # fmt: skip


@pytest.mark.parametrize("version", ["0.11.0", "0.14.1", "0.22.1", "0.25.1", "0.32.0"])
def test_the_relays_decoder_reads_every_version(version: str) -> None:
    payload = encode_batch(1.5, [AllBlocksCleared(), REMOVED, STORED], 3, dialect_of(version))
    decoded = decode_payload(0, payload, Source())
    assert not decoded.rejects
    assert len(decoded.events) == 3


def test_a_version_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.10"):
        dialect_of("0.10.2")
