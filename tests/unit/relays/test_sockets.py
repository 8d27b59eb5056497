"""The frames of published messages."""

import pytest

from relays.sockets import unframe_published
from schemas.errors import FrameError
from schemas.events import MAX_NUMBER


def test_a_message_has_three_parts_and_eight_bytes_of_sequence() -> None:
    """Topic, big-endian sequence and payload make a message, whatever topic and payload hold."""
    assert unframe_published([b"kv", b"\0" * 7 + b"\x09", b"payload"]) == (9, b"payload")
    assert unframe_published([b"", MAX_NUMBER.to_bytes(8, "big"), b""]) == (MAX_NUMBER, b"")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frame_count: 0 frames"),
        ([b"", b"payload"], "frame_count: 2 frames"),
        ([b"", b"\0" * 8, b"payload", b""], "frame_count: 4 frames"),
        ([b"", b"\0" * 7, b"payload"], "sequence: 7 bytes"),
        ([b"", b"\0" * 9, b"payload"], "sequence: 9 bytes"),
        ([b"", (MAX_NUMBER + 1).to_bytes(8, "big"), b"payload"], f"sequence: {MAX_NUMBER + 1}"),
    ],
)
def test_anything_else_is_refused_with_its_own_reason(frames: list[bytes], reason: str) -> None:
    """The reason is the metric's label; the detail says what was found."""
    with pytest.raises(FrameError, match=reason):
        unframe_published(frames)
