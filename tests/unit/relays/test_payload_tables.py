"""The decoders of ZMQ payloads: a table each, fed whole, cut off at each byte and with something behind; no batches."""

from collections.abc import Callable
from typing import Any

import pytest

from relays import sglang, vllm
from relays.batches import MAX_EVENTS, MAX_PAYLOAD_BYTES
from relays.engine_events import Decoded
from schemas.errors import FrameError
from tests.support import sglang_frames, vllm_frames
from tests.support.payloads import TIME_S, pack

Decode = Callable[[int, bytes, Any], Decoded]
VLLM_ITEMS = {"BlockStored": 15, "BlockRemoved": 6, "AllBlocksCleared": 1}  # of positional events, with the tag
SGLANG_ITEMS = {"BlockStored": 8, "BlockRemoved": 3, "AllBlocksCleared": 1}

VLLM = [pytest.param(vllm.decode_payload, VLLM_ITEMS, case, id=f"vllm {case.name}") for case in vllm_frames.CASES]
SGLANG = [
    pytest.param(sglang.decode_payload, SGLANG_ITEMS, case, id=f"sglang {case.name}") for case in sglang_frames.CASES
]
TABLES = pytest.mark.parametrize(("decode", "items", "case"), [*VLLM, *SGLANG])
DECODERS = pytest.mark.parametrize(
    ("decode", "source"), [(vllm.decode_payload, vllm.Source()), (sglang.decode_payload, sglang.Source())]
)


@TABLES
def test_a_payload_says_what_the_table_says(decode: Decode, items: dict[str, int], case: Any) -> None:
    """Every version's payload decodes to the expected events, without a refusal."""
    whole = decode(3, case.payload, case.source)
    assert whole.rejects == ()
    assert list(whole.events) == list(case.events)
    assert (whole.sequence, whole.time_s, whole.rank) == (3, TIME_S, 0)


@TABLES
def test_a_payload_cut_off_at_any_byte_is_refused_whole(decode: Decode, items: dict[str, int], case: Any) -> None:
    """No prefix of a payload decodes: each raises FrameError, so nothing of it is applied."""
    for end in range(len(case.payload)):
        with pytest.raises(FrameError):
            decode(3, case.payload[:end], case.source)


@TABLES
def test_bytes_behind_a_payload_refuse_it(decode: Decode, items: dict[str, int], case: Any) -> None:
    """A payload with a byte too many is no batch."""
    with pytest.raises(FrameError, match="batch_malformed"):
        decode(3, case.payload + b"\xc0", case.source)


@TABLES
def test_fields_of_a_later_version_are_passed_over(decode: Decode, items: dict[str, int], case: Any) -> None:
    """Extra elements behind batch and events, or extra keys in a map, change nothing."""
    assert list(decode(3, pack(_longer(case.value, items)), case.source).events) == list(case.events)


def _longer(batch: object, items: dict[str, int]) -> object:
    if isinstance(batch, dict):
        events = [_longer_event(event, items) for event in batch["events"]]
        return {**batch, "events": events, "of_a_later_version": [1]}
    assert isinstance(batch, list)
    time_s, events, rank = batch
    return [time_s, [_longer_event(event, items) for event in events], rank, "of a later version"]


def _longer_event(event: object, items: dict[str, int]) -> object:
    if isinstance(event, dict):
        return {**event, "of_a_later_version": {"a": 1}}
    assert isinstance(event, list)
    return [*event, *[None] * (items[event[0]] - len(event)), "of a later version"]


BAD_BATCHES = [
    ("nothing", b""),
    ("no msgpack", b"\xc1"),
    ("a number", pack(7)),
    ("text", pack("BlockStored")),
    ("an empty array", pack([])),
    ("no events", pack([TIME_S])),
    ("events that are a map", pack([TIME_S, {}, 0])),
    ("a time that is text", pack(["now", [], 0])),
    ("a map without events", pack({"ts": TIME_S})),
    ("a rank that is text", pack([TIME_S, [], "0"])),
    ("a negative rank", pack([TIME_S, [], -1])),
    ("a rank beyond all", pack([TIME_S, [], 1 << 16])),
    ("a length that never comes", b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"),
    ("nesting without an end", b"\x93\xcb" + bytes(8) + b"\x91" * 200_000),
]


@DECODERS
@pytest.mark.parametrize("payload", [row[1] for row in BAD_BATCHES], ids=[row[0] for row in BAD_BATCHES])
def test_what_is_no_batch_is_refused_whole(decode: Decode, source: object, payload: bytes) -> None:
    """A payload that is no batch raises FrameError."""
    with pytest.raises(FrameError):
        decode(3, payload, source)


@DECODERS
def test_sizes_are_bounded(decode: Decode, source: object) -> None:
    """A payload beyond its bytes or events is refused whole, before its events are looked at."""
    with pytest.raises(FrameError, match="payload_bytes"):
        decode(3, b"\0" * (MAX_PAYLOAD_BYTES + 1), source)
    with pytest.raises(FrameError, match="event_count"):
        decode(3, pack([TIME_S, [None] * (MAX_EVENTS + 1), 0]), source)


@DECODERS
def test_a_rank_may_be_missing(decode: Decode, source: object) -> None:
    """A batch of two elements, as a default would leave it, has no rank."""
    assert decode(3, pack([TIME_S, []]), source).rank is None
