"""`kv.control`: what one part asks of another, keyed by replica or pool."""

from typing import Literal

import msgspec

from schemas.errors import FrameError


class Resync(msgspec.Struct, frozen=True, tag="resync"):
    """Tell everything about this holder again, after a random delay, so that not all speak at once."""

    name: str
    rank: int | None
    reason: Literal["records_lost", "operator"]
    within_s: float = 2.0


_decoder = msgspec.json.Decoder(Resync)


def encode_control(message: Resync) -> bytes:
    """Return the message as JSON."""
    return msgspec.json.encode(message)


def decode_control(data: bytes) -> Resync:
    """Return the message.

    Raises:
        FrameError: the bytes are no control message.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("control_malformed", str(error)) from error
