"""What llm-d's publisher says, from its recorded frames and from broken ones."""

import msgspec
import pytest

from relays.engine_events import Removed, Stored
from relays.llmd import decode_llmd
from schemas.errors import FrameError
from tests.support.pool_frames import file_message
from tests.support.store_samples import store_samples

MODEL = "example/model-8b"


def test_recorded_messages() -> None:
    """Three files, two whose names have their top bit set, and removals, of the model in the topic."""
    decoded = [decode_llmd(topic, payload) for topic, _, payload in store_samples("llmd")]
    assert [(message.events, message.rejects) for message in decoded] == [
        (
            {
                MODEL: (
                    Stored(
                        hashes=(9588624328211013661, 15550052362734618010, 5437791540335860102),
                        tier="disk",
                        names_chunks=True,
                    ),
                )
            },
            (),
        ),
        ({MODEL: (Stored(hashes=((1 << 64) - 5, (1 << 63) + 7), tier="disk", names_chunks=True),)}, ()),
        ({MODEL: (Removed(hashes=(9588624328211013661,), tier="disk", names_chunks=True),)}, ()),
        ({"other/model": (Removed(hashes=(15550052362734618010,), tier="disk", names_chunks=True),)}, ()),
    ]
    assert int(decoded[0].time_s) == 1795963876


@pytest.mark.parametrize("topic", [b"", b"kv@SHARED_STORAGE", b"kv@pod-1@model", b"x@OBJECT_STORE@model", b"\xff@a@b"])
def test_a_topic_of_another_publisher_is_refused(topic: bytes) -> None:
    """Model and medium stand nowhere else."""
    with pytest.raises(FrameError, match="topic"):
        decode_llmd(topic, file_message("m", ("stored", [1]))[2])


def test_a_models_name_may_hold_the_separator() -> None:
    """All behind the second one is the name."""
    topic, _, payload = file_message("org/model@main", ("stored", [1]), medium="OBJECT_STORE")
    assert list(decode_llmd(topic, payload).events) == ["org/model@main"]


def test_an_event_that_cannot_be_read_costs_itself() -> None:
    """An unknown tag, a hash of another type or width, a bin that is none: counted, and the others are read."""
    good = msgspec.msgpack.encode(["BlockStored", [1], 0, [], 0, None, "SHARED_STORAGE", "a later field"])
    bad: list[object] = [
        msgspec.msgpack.encode(["BlockMoved", [1]]),
        msgspec.msgpack.encode(["BlockStored", ["a"]]),
        msgspec.msgpack.encode(["BlockStored", [1 << 64 - 1, -(1 << 63), 1.5]]),
        b"\xc1",
        b"",
    ]
    message = decode_llmd(b"kv@SHARED_STORAGE@m", msgspec.msgpack.encode([1.0, [*bad, good]]))
    assert message.events == {"m": (Stored(hashes=(1,), tier="disk", names_chunks=True),)}
    assert [reject.position for reject in message.rejects] == [0, 1, 2, 3, 4]


def test_a_message_cut_anywhere_is_refused() -> None:
    """At each byte."""
    topic, _, payload = store_samples("llmd")[0]
    for end in range(len(payload)):
        with pytest.raises(FrameError, match="batch_malformed"):
            decode_llmd(topic, payload[:end])
