"""The simulated Mooncake master: leases, room, evictions, and what it publishes."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.simulator.mooncake.master import Changed, Master
from ops.simulator.mooncake.settings import MasterSettings
from ops.simulator.mooncake.wire import decode_question, encode_batches, encode_question, object_key
from relays.engine_events import EngineEvent, Removed, Stored
from relays.mooncake import KeyPattern, decode_mooncake
from schemas.errors import BadRequest, ConfigError
from tests.support.pool_frames import object_event

LEASE_S = 5.0
NAME = bytes(range(32))


def master(objects: int = 20, **changes: float) -> Master:
    return Master(objects, **{"lease_s": LEASE_S, "high_watermark": 0.9, "eviction_ratio": 0.1, **changes})


def keys(*numbers: int) -> list[str]:
    return [f"k{number}" for number in numbers]


# ---- what is there


def test_an_object_is_there_once_it_was_put() -> None:
    """Putting it again changes nothing and is told to nobody."""
    store = master()
    assert store.put(keys(1, 2), 0.0) == [True, True]
    assert store.put(keys(2, 3), 1.0) == [True, True]
    assert store.exist(keys(0, 1, 2, 3), 1.0) == [False, True, True, True]
    assert store.take_changes() == [Changed("stored", key) for key in keys(1, 2, 3)]
    assert store.take_changes() == []


def test_without_room_an_object_is_refused_until_others_went() -> None:
    """A refusal lets the next eviction go ahead, whatever is full."""
    store = master(4, high_watermark=1.0)
    assert store.put(keys(1, 2, 3, 4, 5), 0.0) == [True, True, True, True, False]
    assert store.evict(0.0) == 1
    assert store.evict(0.0) == 0
    assert store.put(keys(5), 1.0) == [True]
    assert store.take_changes()[4:] == [Changed("removed", "k1"), Changed("stored", "k5")]


def test_nothing_goes_up_to_the_watermark() -> None:
    """Above it a tenth goes, and what is above it."""
    store = master()
    store.put(keys(*range(18)), 0.0)
    assert store.evict(1.0) == 0
    store.put(keys(18, 19), 0.0)
    assert store.evict(1.0) == 4
    assert len(store) == 16


def test_what_was_looked_up_longest_ago_goes_first() -> None:
    """And what was looked up within a lease does not go at all."""
    store = master(10)
    store.put(keys(*range(10)), 0.0)
    store.exist(keys(0, 1, 2), 1.0)
    store.exist(keys(*range(3, 10)), 2.0)
    assert store.evict(5.9) == 0
    assert store.evict(6.0) == 2
    assert [change.key for change in store.take_changes()[10:]] == keys(0, 1)
    store.put(keys(0, 1), 6.0)
    assert store.evict(6.5) == 2
    assert [change.key for change in store.take_changes()[-2:]] == keys(2, 0)


# ---- the wire


def test_an_event_has_all_fields_of_a_masters() -> None:
    """Those that a store of objects cannot know are nil."""
    key = object_key("org/model", NAME)
    (payload,) = encode_batches([Changed("removed", key)], "store-node-0", 1, 1700000000500)
    assert msgspec.msgpack.decode(payload) == [1700000000500, [object_event("removed", key)], 0]


def test_our_decoder_finds_models_and_names() -> None:
    """A message has 64 events at most, ids go on, and order is kept."""
    names = [bytes([number]) * 32 for number in range(150)]
    changes = [Changed("stored" if n % 3 else "removed", object_key("org/model", name)) for n, name in enumerate(names)]
    payloads = list(encode_batches(changes, "store", 7, 1700000000500))
    assert [len(msgspec.msgpack.decode(payload)[1]) for payload in payloads] == [64, 64, 22]
    assert [event["event_id"] for payload in payloads for event in msgspec.msgpack.decode(payload)[1]] == list(
        range(7, 157)
    )
    events: list[EngineEvent] = []
    for payload in payloads:
        message = decode_mooncake(payload, KeyPattern())
        assert not message.rejects
        assert message.time_s == 1700000000.5
        events += message.events["org/model"]
    for number, (event, name) in enumerate(zip(events, names, strict=True)):
        assert isinstance(event, Stored if number % 3 else Removed)
        assert event.hashes == (int.from_bytes(name[-8:], "big"),)
        assert event.tier == "host"


@given(st.lists(st.text()), st.sampled_from(["exist", "put"]))
def test_a_question_arrives(asked: list[str], verb: str) -> None:
    """Verb and keys are what was asked."""
    question = decode_question(encode_question(verb, asked))  # type: ignore[arg-type]  # one of the two
    assert (question.verb, question.keys) == (verb, asked)


@given(st.binary())
def test_what_is_no_question_is_refused(body: bytes) -> None:
    """Any bytes are a question or BadRequest."""
    with suppress(BadRequest):
        assert decode_question(body).verb in ("exist", "put")


# ---- settings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objects": 0}, "objects: 0"),
        ({"default_kv_lease_ttl": -1}, "default_kv_lease_ttl: -1"),
        ({"eviction_ratio": 0.0}, "eviction_ratio: 0.0"),
        ({"eviction_high_watermark_ratio": 1.5}, "eviction_high_watermark_ratio: 1.5"),
        ({"events_port": 50_051}, "events_port: 50051 is taken by rpc_port"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(changes: dict[str, float], named: str) -> None:
    """With its value."""
    with pytest.raises(ConfigError, match=named):
        msgspec.structs.replace(MasterSettings(), **changes).check()
