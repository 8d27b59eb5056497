"""The simulated SGLang's events and payloads, by version."""

from typing import Any

import msgspec
import pytest

from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.events import GPU, HOST, Recorder
from ops.simulator.sglang.pages import Namespace
from ops.simulator.sglang.wire import encode_batch
from relays.sglang import Source, decode_payload
from schemas.errors import ConfigError
from schemas.sglang import AllBlocksCleared, BlockRemoved, BlockStored

STORED = BlockStored(block_hashes=[-1], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="GPU")
SALTED = BlockStored(
    block_hashes=[5], parent_block_hash=4, token_ids=[1, 2], block_size=2, medium="GPU", cache_salt="s", lora_name="sql"
)
REMOVED = BlockRemoved(block_hashes=[5], medium="CPU_PINNED")
VERSIONS = ["0.5.6", "0.5.10.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.22", "0.5.23", "0.6.0"]


def encoded(version: str, *events: Any) -> list[Any]:
    batch = msgspec.msgpack.decode(encode_batch(1.5, events, 3, dialect_of(version)))
    assert [batch[0], batch[2]] == [1.5, 3]
    told: list[Any] = batch[1]
    return told


@pytest.mark.parametrize(
    ("version", "stored", "removed"), [("0.5.8", 6, 2), ("0.5.9", 7, 3), ("0.5.17", 7, 3), ("0.5.19", 7, 3)]
)
def test_up_to_0_5_19_events_are_arrays_of_the_versions_length(version: str, stored: int, removed: int) -> None:
    """The tier's name came with 0.5.9."""
    events = encoded(version, AllBlocksCleared(), STORED, REMOVED)
    assert events[0] == ["AllBlocksCleared"]
    assert [len(events[1]), len(events[2])] == [stored, removed]


def test_a_salted_array_ends_with_a_map() -> None:
    """0.5.18 and 0.5.19 put the salt behind the tier; stores without one are as long as they were."""
    plain, salted = encoded("0.5.18", STORED, SALTED)
    assert len(plain) == 7
    assert salted[7:] == [{"cache_salt": "s"}]


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_from_0_5_20_on_events_are_maps_in_sglangs_order(version: str) -> None:
    """Parent and adapter's id are always there; what is unset behind them is left out."""
    plain, salted, removed = encoded(version, STORED, SALTED, REMOVED)
    head = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"]
    assert list(plain) == [*head, "medium"]
    assert list(salted) == [*head, "medium", "cache_salt", "lora_name"]
    assert list(removed) == ["type", "block_hashes", "medium"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_relays_decoder_reads_every_version(version: str) -> None:
    """All kinds of events, without a refusal."""
    payload = encode_batch(1.5, [AllBlocksCleared(), STORED, REMOVED], 3, dialect_of(version))
    decoded = decode_payload(0, payload, Source())
    assert not decoded.rejects
    assert len(decoded.events) == 3


def recorded(version: str, event_format: Any = "default") -> Recorder:
    return Recorder(dialect_of(version, event_format), 2)


PAGES = [(1, 2), (3, 4), (5, 6)]


def test_stores_are_one_a_page_and_later_one_a_chain() -> None:
    """From 0.5.18 on what follows the last store in the same tier is a part of it."""
    for version, stores in (("0.5.17", 3), ("0.5.18", 1)):
        recorder = recorded(version)
        digests = recorder.hasher.chain(Namespace(), None, PAGES)
        recorder.stored(Namespace(), None, PAGES[:2], digests[:2], GPU)
        recorder.stored(Namespace(), digests[1], PAGES[2:], digests[2:], GPU)
        assert len(recorder.take()) == stores
    recorder = recorded("0.5.23")
    recorder.stored(Namespace(), None, PAGES[:2], digests[:2], GPU)
    recorder.stored(Namespace(), digests[1], PAGES[2:], digests[2:], HOST)
    assert len(recorder.take()) == 2


@pytest.mark.parametrize(
    ("version", "lengths"), [("0.5.14", [1] * 5), ("0.5.15", [3, 1, 1]), ("0.5.18", [5]), ("0.5.23", [4, 1])]
)
def test_removals_are_gathered_as_the_version_does(version: str, lengths: list[int]) -> None:
    """A page each, a node each, all in a row, and all in a row of one extra key."""
    recorder = recorded(version)
    digests = recorder.hasher.chain(Namespace(), None, PAGES)
    recorder.removed(Namespace(), digests, GPU)
    recorder.removed(Namespace(salt="s"), digests[:1], GPU)
    recorder.removed(Namespace("x"), digests[:1], GPU)
    assert [len(event.block_hashes) for event in recorder.take() if isinstance(event, BlockRemoved)] == lengths


@pytest.mark.parametrize(
    ("version", "event_format", "salt", "adapter", "extra_key"),
    [
        ("0.5.17", "default", False, False, False),
        ("0.5.18", "default", True, False, False),
        ("0.5.22", "default", True, False, False),
        ("0.5.22", "dynamo", True, True, True),
        ("0.5.23", "default", True, True, False),
    ],
)
def test_namespaces_are_in_hashes_as_far_as_the_version_goes(
    version: str, event_format: str, *, salt: bool, adapter: bool, extra_key: bool
) -> None:
    """A namespace that is not hashed has the names of plain pages."""
    recorder = recorded(version, event_format)

    def name(namespace: Namespace) -> int:
        return recorder.hasher.announced(namespace, recorder.hasher.chain(namespace, None, PAGES)[-1])

    plain = name(Namespace())
    assert (name(Namespace(salt="s")) != plain) is salt
    assert (name(Namespace("id", adapter="sql")) != plain) is adapter
    assert (name(Namespace("x")) != plain) is extra_key


@pytest.mark.parametrize(
    ("version", "event_format", "message"),
    [("0.5.5", "default", r"0\.5\.5 is older"), ("0.5.21", "dynamo", "no dynamo format"), ("x", "default", "number")],
)
def test_a_version_that_is_not_known_is_refused(version: str, event_format: Any, message: str) -> None:
    """By name, before anything is bound."""
    with pytest.raises(ConfigError, match=message):
        dialect_of(version, event_format)
