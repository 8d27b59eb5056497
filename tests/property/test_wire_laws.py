"""Laws of everything that is read from a wire: it comes back whole, or it is refused as bad input."""

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from index.fold import Flush, fold
from index.hashing import Tokens, chain_hashes, pack_hashes, pack_tokens, unpack_hashes
from relays.sockets import unframe_published
from relays.vllm import Source, decode_payload
from schemas.control import decode_control
from schemas.errors import BadInput
from schemas.events import Record, decode_record, encode_record
from schemas.profiles import decode_entry
from tests.support.coroutines import immediate
from tests.support.random_records import records
from tests.support.replayed import memory_store
from tests.support.vllm_frames import CASES

SOURCES = [Source(), Source(hash_bits=256), Source(multiple_groups=False, adapters={"1": "a"})]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "GPU", "stored", "alive", "profile"])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4) | st.just("type"), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(records())
@settings(max_examples=300, deadline=None)
def test_a_record_decodes_to_what_was_encoded(record: Record) -> None:
    """decode(encode(x)) = x for every record that a relay may write."""
    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=200) | values.map(msgspec.msgpack.encode))
@example(b"\x99")
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_record_or_bad_input(data: bytes) -> None:
    """Whatever is read from a topic decodes or raises BadInput, and nothing else."""
    for read in (decode_record, decode_entry, decode_control):
        try:
            read(data)
        except BadInput:
            continue


@given(records(), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_damaged_record_is_a_record_or_bad_input(record: Record, at: int, byte: int) -> None:
    """A record with one byte changed decodes or raises BadInput, and what decodes can be folded and applied."""
    data = bytearray(encode_record(record))
    data[at % len(data)] = byte
    try:
        damaged = decode_record(bytes(data))
    except BadInput:
        return
    store = memory_store()
    immediate(store.apply(Flush("m", None, fold([damaged]))))
    immediate(store.digest("m", damaged.holder))


@given(st.sampled_from(SOURCES), st.binary(max_size=200) | values.map(msgspec.msgpack.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_batch_or_bad_input(source: Source, payload: bytes) -> None:
    """The vLLM decoder reads a payload or raises BadInput, and nothing else."""
    try:
        decode_payload(0, payload, source)
    except BadInput:
        return


@given(st.sampled_from(SOURCES), st.sampled_from(CASES), st.data())
@settings(max_examples=300, deadline=None)
def test_any_event_in_a_batch_is_concluded_or_refused(source: Source, case: Any, data: st.DataObject) -> None:
    """A batch with any field of an event replaced by anything decodes, each event concluded or refused."""
    batch = case.value if isinstance(case.value, list) else list(case.value.values())
    events = [list(event) if isinstance(event, (list, tuple)) else dict(event) for event in batch[1]]
    if events:
        event: Any = data.draw(st.sampled_from(events))
        key = data.draw(st.sampled_from(range(len(event)) if isinstance(event, list) else sorted(event)))
        event[key] = data.draw(values)
    decoded = decode_payload(0, msgspec.msgpack.encode([1.0, events, 0]), source)
    assert len(decoded.events) + len(decoded.rejects) == len(events)


@given(st.lists(st.binary(max_size=12), max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_frames_are_a_message_or_bad_input(frames: list[bytes]) -> None:
    """Any multipart message decodes or raises BadInput."""
    try:
        sequence, payload = unframe_published(frames)
        decode_payload(sequence, payload, Source())
    except BadInput:
        return


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_packed_hashes_unpack(hashes: list[int]) -> None:
    """unpack(pack(x)) = x for any u64 hashes."""
    assert unpack_hashes(pack_hashes(hashes)) == hashes


@given(st.lists(st.integers(0, (1 << 34) - 1), max_size=40), st.integers(1, 5), st.booleans(), st.integers(0, 7))
def test_a_chain_may_be_hashed_in_pieces(token_ids: list[int], unit: int, pairs: bool, cut: int) -> None:
    """Hashing a prompt at once, and its rest from any block on, gives the same chain."""
    whole = chain_hashes(1, pack_tokens(token_ids), unit, pairs=pairs)
    cut = min(cut, len(whole))
    rest = chain_hashes(whole[cut - 1] if cut else 1, pack_tokens(token_ids[cut * unit :]), unit, pairs=pairs)
    assert whole == whole[:cut] + rest


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.integers(1, 5))
def test_narrow_and_wide_packing_hash_alike(token_ids: list[int], unit: int) -> None:
    """Tokens below 2^32 hash the same whether they come as u32 or as u64."""
    wide = Tokens(pack_hashes(token_ids), wide=True)
    assert chain_hashes(1, wide, unit) == chain_hashes(1, pack_tokens(token_ids), unit)
