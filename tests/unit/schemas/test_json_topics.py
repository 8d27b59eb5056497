"""The topics that operators read: replicas and control, as JSON."""

import pytest

from schemas.control import Resync, decode_control, encode_control
from schemas.errors import FrameError, ProfileError
from schemas.profiles import Group, ReplicaEntry, decode_entry, encode_entry
from tests.support.engines import FULL, pairs, profile, tiers

GARBAGE = [b"", b"{", b"[]", b"\xff", b'{"life": "x"}', b"[" * 100_000]


def test_a_replicas_entry_comes_back_whole() -> None:
    """A profile with groups, pairs and tiers is the same after it was written as JSON."""
    entry = ReplicaEntry(
        3, profile(Group(1, "window", 4, 8), pairs=pairs((FULL, "host")), tiers=tiers("gpu", "host", capacity=5))
    )
    assert decode_entry(encode_entry(entry)) == entry


def test_a_control_message_comes_back_whole() -> None:
    """A request to tell everything again is the same after it was written as JSON."""
    message = Resync("r", 0, "records_lost", within_s=1.5)
    assert decode_control(encode_control(message)) == message


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_on_a_json_topic_is_refused(data: bytes) -> None:
    """What is no entry and no message raises the error that its reader counts."""
    with pytest.raises(ProfileError):
        decode_entry(data)
    with pytest.raises(FrameError):
        decode_control(data)
