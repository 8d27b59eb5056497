"""What the msgpack dialects share: a batch of still-encoded events, decoded one by one so that a bad one costs only
itself; pure."""

from collections.abc import Callable, Iterable, Sized
from typing import Any, NamedTuple, TypeVar

import msgspec

from relays.engine_events import Decoded, EngineEvent, EngineHash, Reject, RejectReason, normalize_hash
from schemas.batches import Batch, MapBatch
from schemas.errors import FrameError

MAX_PAYLOAD_BYTES = 32 << 20
MAX_EVENTS = 100_000
MAX_BLOCK_SIZE = 1 << 20

BROKEN = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)
"""What a decoder of hostile bytes may raise."""


AnyBatch = TypeVar("AnyBatch")
Raw = TypeVar("Raw")
Read = TypeVar("Read")


class Refused(Exception):
    """One event that cannot be used; the others of its batch can."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class EventDecoders(NamedTuple):
    """An engine's events in their two encodings."""

    maps: "msgspec.msgpack.Decoder[Any]"  # of a union of structs
    arrays: "msgspec.msgpack.Decoder[Any]"


_batches = msgspec.msgpack.Decoder(Batch)
_map_batches = msgspec.msgpack.Decoder(MapBatch)


def decode_batch(
    sequence: int, payload: bytes, decoders: EventDecoders, conclude: Callable[[Any], EngineEvent | list[EngineEvent]]
) -> Decoded:
    """Return what a batch says; events that are refused, by decoder or by `conclude`, are listed beside the others.

    Raises:
        FrameError: the payload is no batch.
    """
    batch = read_payload(payload, _read_batch, lambda batch: batch.events)
    concluded, rejects = read_each(batch.events, lambda raw: conclude(_read_event(raw, decoders)))
    events: list[EngineEvent] = []
    for one in concluded:
        events += one if isinstance(one, list) else [one]
    return Decoded(sequence, batch.ts, batch.data_parallel_rank, tuple(events), rejects)


def read_payload(
    payload: bytes,
    read: Callable[[bytes], AnyBatch],
    events_in: Callable[[AnyBatch], Sized],
    *,
    most_bytes: int = MAX_PAYLOAD_BYTES,
) -> AnyBatch:
    """Return what `read` makes of a message, whose events are still encoded.

    Raises:
        FrameError: it cannot be read, is too large, or holds too many events.
    """
    if len(payload) > most_bytes:
        raise FrameError("payload_bytes", f"{len(payload)} bytes, at most {most_bytes}")
    try:
        batch = read(payload)
    except BROKEN as error:
        raise FrameError("batch_malformed", first_line(error)) from error
    count = len(events_in(batch))
    if count > MAX_EVENTS:
        raise FrameError("event_count", f"{count} events, at most {MAX_EVENTS}")
    return batch


def read_each(raws: Iterable[Raw], read: Callable[[Raw], Read]) -> tuple[list[Read], tuple[Reject, ...]]:
    """Return what `read` makes of each event, and those that it refuses with where they stood."""
    results: list[Read] = []
    rejects: list[Reject] = []
    for position, raw in enumerate(raws):
        try:
            results.append(read(raw))
        except Refused as refused:
            rejects.append(Reject(refused.reason, position, refused.detail))
    return results, tuple(rejects)


def read_struct(
    decoder: "msgspec.msgpack.Decoder[Read] | msgspec.json.Decoder[Read]", raw: bytes | msgspec.Raw
) -> Read:
    """Return an event's struct; one that is of another form is refused."""
    try:
        return decoder.decode(raw)
    except BROKEN as error:
        raise Refused(RejectReason.MALFORMED, first_line(error)) from error


def check_tokens(tokens: list[int], block_size: int, hashes: int, largest: int, *, masked: bool) -> None:
    """Refuse a store whose tokens do not fill its blocks; `masked`: some blocks may have no hash (vLLM 0.22)."""
    count = len(tokens)
    if not 0 < block_size <= MAX_BLOCK_SIZE:
        raise Refused(RejectReason.BLOCK_SIZE, f"block_size: {block_size}")
    blocks = count // block_size
    if count % block_size or blocks < hashes or (blocks != hashes and not masked):
        raise Refused(RejectReason.TOKEN_COUNT, f"token_ids: {count} for {hashes} blocks of {block_size}")
    if tokens and (min(tokens) < 0 or max(tokens) > largest):
        raise Refused(RejectReason.TOKEN_RANGE, f"token_ids: outside 0..{largest}")


def read_hashes(values: Iterable[EngineHash], bits: int) -> tuple[EngineHash, ...]:
    """Return an event's hashes in normal form."""
    return tuple(read_hash(value, bits, f"block_hashes[{position}]") for position, value in enumerate(values))


def read_hash(value: EngineHash, bits: int, place: str) -> EngineHash:
    """Return one hash in normal form; `place` names it where it is none."""
    if isinstance(value, bytes) and not 8 <= len(value) <= 64:
        raise Refused(RejectReason.HASH, f"{place}: {len(value)} bytes")
    return normalize_hash(value, bits)


def first_line(error: BaseException) -> str:
    """Return the error's first line, short enough for a log."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _read_batch(payload: bytes) -> Batch | MapBatch:
    is_map = bool(payload) and (0x80 <= payload[0] <= 0x8F or payload[0] in (0xDE, 0xDF))
    batch: Batch | MapBatch = _map_batches.decode(payload) if is_map else _batches.decode(payload)
    if batch.data_parallel_rank is not None and not 0 <= batch.data_parallel_rank < 1 << 16:
        raise FrameError("rank", f"data_parallel_rank: {batch.data_parallel_rank}")
    return batch


def _read_event(raw: msgspec.Raw, decoders: EventDecoders) -> Any:
    first = bytes(memoryview(raw)[:1])
    is_array = bool(first) and (0x90 <= first[0] <= 0x9F or first[0] in (0xDC, 0xDD))
    try:
        return (decoders.arrays if is_array else decoders.maps).decode(raw)
    except BROKEN as error:
        raise Refused(reason_of(error), first_line(error)) from error


def reason_of(error: BaseException) -> RejectReason:
    """Return why an event that could not be decoded is refused: msgspec says so where its tag is unknown."""
    unknown = isinstance(error, msgspec.ValidationError) and "Invalid value" in str(error)
    return RejectReason.UNKNOWN_EVENT if unknown else RejectReason.MALFORMED
