"""What Mooncake's master says, from samples of its schema, keys of every form and broken messages."""

from typing import Any

import msgspec
import pytest

from relays.batches import Refused
from relays.engine_events import EngineEvent, Removed, Stored
from relays.mooncake import KeyPattern, ObjectName, Shards, decode_mooncake
from schemas.errors import ConfigError, FrameError
from schemas.profiles import Tier
from tests.support.pool_frames import object_event, object_message
from tests.support.store_samples import store_samples

HEX, DECIMAL = 0xF1E2D3C4B5A69788, 1234567890
PLAIN = KeyPattern()


def stored(*names: int, tier: Tier = "host", shard: int = 0) -> Stored:
    return Stored(hashes=names, tier=tier, group=shard, names_chunks=True)


def removed(*names: int) -> Removed:
    return Removed(hashes=names, tier="host", names_chunks=True)


def test_constructed_messages() -> None:
    """Keys that are numbers, a key with model and rank, both media, and fields that can be switched off."""
    decoded = [decode_mooncake(payload, PLAIN) for _, _, payload in store_samples("mooncake")]
    assert [(dict(message.events), message.rejects) for message in decoded] == [
        ({"": (stored(HEX), stored(DECIMAL))}, ()),
        ({"example-model": (stored(0x9A0B3D52E6C7A1B2),)}, ()),
        ({"": (stored(HEX, tier="disk"),)}, ()),
        ({"": (removed(HEX),)}, ()),
        ({"": (removed(DECIMAL),)}, ()),
    ]
    assert decoded[0].time_s == 1790000000.123


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("org/model@tp_rank:1@pcp0@dcp0@pp_rank:0@group:0@" + "00" * 31 + "0b", ObjectName("org/model", 1, 11)),
        ("org/model@tp_rank:0@pcp0@dcp0@pp_rank:1@" + "ab" * 32, ObjectName("org/model", 2, 0xABABABABABABABAB)),
        ("prefix@org/model@tp1@ff", ObjectName("prefix@org/model", 1, 255)),
        ("model@tp0@4f1c9a0b3d52e6c7a1b2", ObjectName("model", 0, 0x9A0B3D52E6C7A1B2)),
        ("model@tp0@", None),
        ("model@tp0@xyz", None),
        ("1234567890", None),
        ("", None),
    ],
)
def test_keys(key: str, read: ObjectName | None) -> None:
    """Model, shard and the hash's low 64 bits; other keys are nobody's."""
    assert KeyPattern(shards=Shards(tp=2, pp=2)).read(key) == read


@pytest.mark.parametrize("key", ["m@tp2@ff", "m@tp0@pcp1@ff", "m@tp0@pcp0@dcp0@pp_rank:0@group:1@ff"])
def test_a_rank_or_group_that_a_block_should_not_have_is_refused(key: str) -> None:
    """With another size a block would count as whole without all of its shards."""
    with pytest.raises(Refused, match="object_key"):
        KeyPattern(shards=Shards(tp=2)).read(key)


def test_a_pattern_of_ones_own() -> None:
    """It needs a group named `hash`; model and ranks may be missing."""
    assert KeyPattern(r"kv/(?P<hash>[0-9a-f]+)").read("kv/ff") == ObjectName("", 0, 255)
    assert KeyPattern(r"kv/(?P<hash>.+)").read("kv/no number") is None
    for wrong in ("(", "kv/(?P<name>.+)"):
        with pytest.raises(ConfigError, match="key_pattern"):
            KeyPattern(wrong)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (object_event("moved", "0xb", "cpu", 11), "unknown_event"),
        (object_event("stored", "no number"), "hash"),
        (object_event("stored", "0xb", "cpu", 11, seq_hashes=["b"]), "malformed"),
        ({"event_type": 5}, "malformed"),
        ([], "malformed"),
    ],
)
def test_an_event_that_cannot_be_read_costs_itself(event: Any, reason: str) -> None:
    """It is counted, and the others are read."""
    good = object_event("stored", "0xb", "nvme", 11, a_later_field=1)
    message = decode_mooncake(object_message(event, good)[2], PLAIN)
    assert message.events == {"": (stored(11, tier="other"),)}
    assert [(reject.reason.value, reject.position) for reject in message.rejects] == [(reason, 0)]


def test_the_alias_alone_tells_the_kind() -> None:
    """`type` says what `event_type` does not."""
    events: list[EngineEvent] = []
    for kind in ("stored", "removed"):
        payload = object_message(object_event(kind, "0xb", "cpu", 11, event_type=None))[2]
        events += decode_mooncake(payload, PLAIN).events[""]
    assert events == [stored(11), removed(11)]


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.5, [], 0]), msgspec.msgpack.encode({})])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    """Its time is an integer of milliseconds."""
    with pytest.raises(FrameError, match="batch_malformed"):
        decode_mooncake(payload, PLAIN)
