"""The vLLM decoder: one table of payloads, fed whole, cut off at each byte, and with something behind it."""

import pytest

from relays.batches import MAX_BLOCK_SIZE, MAX_EVENTS, MAX_PAYLOAD_BYTES
from relays.engine_events import Decoded, RejectReason
from relays.vllm import TIER_SPELLINGS, Source, decode, decode_payload
from schemas.errors import FrameError
from tests.support.vllm_frames import (
    BYTES_A,
    CASES,
    TIME_S,
    Case,
    array_stored,
    batch,
    expected,
    map_removed,
    map_stored,
    pack,
)


def decoded(*events: object, source: Source | None = None) -> Decoded:
    return decode_payload(3, pack(batch(*events)), source or Source())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_payload_says_what_the_table_says(case: Case) -> None:
    """Every version's payload decodes to the expected events, without a refusal."""
    whole = decode_payload(3, case.payload, case.source)
    assert whole.rejects == ()
    assert list(whole.events) == list(case.events)
    assert (whole.sequence, whole.time_s, whole.rank) == (3, TIME_S, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_payload_cut_off_at_any_byte_is_refused_whole(case: Case) -> None:
    """No prefix of a payload decodes: each raises FrameError, so nothing of it is applied."""
    for end in range(len(case.payload)):
        with pytest.raises(FrameError):
            decode_payload(3, case.payload[:end], case.source)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_behind_a_payload_refuse_it(case: Case) -> None:
    """A payload with a byte too many is no batch."""
    with pytest.raises(FrameError, match="batch_malformed"):
        decode_payload(3, case.payload + b"\xc0", case.source)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fields_of_a_later_version_are_passed_over(case: Case) -> None:
    """Extra elements behind batch and events, or extra keys in a map, change nothing."""
    assert list(decode_payload(3, pack(_longer(case.value)), case.source).events) == list(case.events)


def _longer(value: object) -> object:
    if isinstance(value, dict):
        return {**value, "events": [_longer_event(event) for event in value["events"]], "of_a_later_version": [1]}
    assert isinstance(value, list)
    return [value[0], [_longer_event(event) for event in value[1]], *value[2:], "of a later version"]


def _longer_event(event: object) -> object:
    if isinstance(event, dict):
        return {**event, "of_a_later_version": {"a": 1}}
    assert isinstance(event, list)
    known = {"BlockStored": 15, "BlockRemoved": 6, "AllBlocksCleared": 1}[event[0]]
    return [*event, *[None] * (known - len(event)), "of a later version"]


@pytest.mark.parametrize(("spelling", "tier"), [*TIER_SPELLINGS.items(), ("VRAM?", "other"), ("gpu", "other")])
def test_a_medium_is_a_tier_by_its_known_spellings(spelling: str | None, tier: str) -> None:
    """Each known spelling is its tier, and a spelling that nobody knows is `other`, never the GPU."""
    stored, gone = decoded(map_stored(medium=spelling), map_removed(medium=spelling)).events
    assert getattr(stored, "tier", None) == getattr(gone, "tier", None) == tier


REFUSED = [
    ("an unknown event", {"type": "BlockExploded"}, RejectReason.UNKNOWN_EVENT),
    ("an unknown array event", ["BlockExploded"], RejectReason.UNKNOWN_EVENT),
    ("a number", 7, RejectReason.MALFORMED),
    ("a map without a type", {"block_hashes": [1]}, RejectReason.MALFORMED),
    ("an empty array", [], RejectReason.MALFORMED),
    ("a store without tokens", ["BlockStored", [1], None], RejectReason.MALFORMED),
    ("a hash that is text", array_stored(["11"]), RejectReason.MALFORMED),
    ("a token that is text", array_stored([11], None, ["1"] * 4), RejectReason.MALFORMED),
    ("a token that is a fraction", array_stored([11], None, [1.5] * 4), RejectReason.MALFORMED),
    ("a nested event", map_stored(extra_keys=[[[[[["deep"]]]]]]), RejectReason.EXTRA_KEYS),
    ("block size 0 with tokens", array_stored([11], None, [1] * 4, 0), RejectReason.BLOCK_SIZE),
    ("a negative block size", array_stored([11], None, [1] * 4, -4), RejectReason.BLOCK_SIZE),
    ("a huge block size", array_stored([11], None, [1] * 4, MAX_BLOCK_SIZE + 1), RejectReason.BLOCK_SIZE),
    ("three tokens for a block of four", array_stored([11], None, [1] * 3), RejectReason.TOKEN_COUNT),
    ("more hashes than blocks", array_stored([11, 12], None, [1] * 4), RejectReason.TOKEN_COUNT),
    ("a negative token", array_stored([11], None, [1, 1, 1, -1]), RejectReason.TOKEN_RANGE),
    ("a token of 33 bits", array_stored([11], None, [1, 1, 1, 1 << 32]), RejectReason.TOKEN_RANGE),
    ("a hash of four bytes", array_stored([b"1234"]), RejectReason.HASH),
    ("a hash of 65 bytes", array_stored([b"1" * 65]), RejectReason.HASH),
    ("a parent of four bytes", array_stored([11], b"1234"), RejectReason.HASH),
    ("a removed hash of no bytes", map_removed(block_hashes=[b""]), RejectReason.HASH),
    ("a negative group", map_stored(group_idx=-1), RejectReason.GROUP),
    ("a group beyond all", map_stored(group_idx=64), RejectReason.GROUP),
    ("a kind without a rule", map_stored(kv_cache_spec_kind="chunked_local_attention"), RejectReason.GROUP_KIND),
    ("another node's store", map_stored(locality="REMOTE"), RejectReason.LOCALITY),
    ("another node's removal", map_removed(locality="REMOTE"), RejectReason.LOCALITY),
    ("keys for one block of two", map_stored(
        block_hashes=[1, 2], token_ids=[1] * 8, extra_keys=[["salt"]]), RejectReason.EXTRA_KEYS),
    ("two texts", map_stored(extra_keys=[["one", "two"]]), RejectReason.EXTRA_KEYS),
    ("a salt in a later block", map_stored(
        block_hashes=[1, 2], token_ids=[1] * 8, extra_keys=[None, ["salt"]]), RejectReason.EXTRA_KEYS),
    ("a salt below a parent", map_stored(parent_block_hash=10, extra_keys=[["salt"]]), RejectReason.EXTRA_KEYS),
    ("a key that is a number", map_stored(extra_keys=[[7]]), RejectReason.EXTRA_KEYS),
    ("an image without a place", map_stored(extra_keys=[[["img"]]]), RejectReason.EXTRA_KEYS),
    ("a place beyond all prompts", map_stored(extra_keys=[[["img", -(1 << 63)]]]), RejectReason.EXTRA_KEYS),
    ("1025 keys of one block", map_stored(extra_keys=[[["img", n] for n in range(1025)]]), RejectReason.LIMIT),
]  # fmt: skip


@pytest.mark.parametrize(("event", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_bad_event_costs_only_itself(event: object, reason: RejectReason) -> None:
    """An event that cannot be right is refused with its reason and place, and its neighbours are applied."""
    result = decoded(array_stored(), event, array_stored())
    assert list(result.events) == [expected(), expected()]
    assert [(reject.reason, reject.position) for reject in result.rejects] == [(reason, 1)]


def test_a_refusal_never_shows_tokens_or_salts() -> None:
    """The detail of a refusal names fields and sizes, not what a prompt or a tenant said."""
    secret = "tenant-7-secret"
    result = decoded(map_stored(extra_keys=[[secret, secret]]), array_stored([11], None, [1, 2, 987654321, -1]))
    text = " ".join(reject.detail for reject in result.rejects)
    assert len(result.rejects) == 2
    assert secret not in text
    assert "987654321" not in text


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


@pytest.mark.parametrize("payload", [row[1] for row in BAD_BATCHES], ids=[row[0] for row in BAD_BATCHES])
def test_what_is_no_batch_is_refused_whole(payload: bytes) -> None:
    """A payload that is no batch raises FrameError."""
    with pytest.raises(FrameError):
        decode_payload(3, payload, Source())


def test_a_message_has_three_parts_and_eight_bytes_of_sequence() -> None:
    """Topic, big-endian sequence and payload make a message; anything else is refused with its own reason."""
    payload = pack(batch(array_stored()))
    assert decode([b"kv", b"\0" * 7 + b"\x09", payload], Source()).sequence == 9
    assert decode([b"", b"\xff" * 8, payload], Source()).sequence == (1 << 64) - 1
    for frames, reason in [
        ([b"", payload], "frame_count"),
        ([b"", b"\0" * 8, payload, b""], "frame_count"),
        ([b"", b"\0" * 7, payload], "sequence"),
    ]:
        with pytest.raises(FrameError, match=reason):
            decode(frames, Source())


def test_sizes_are_bounded() -> None:
    """A payload beyond its bytes or events is refused whole, before its events are looked at."""
    with pytest.raises(FrameError, match="payload_bytes"):
        decode_payload(3, b"\0" * (MAX_PAYLOAD_BYTES + 1), Source())
    with pytest.raises(FrameError, match="event_count"):
        decode_payload(3, pack([TIME_S, [None] * (MAX_EVENTS + 1), 0]), Source())


def test_a_rank_may_be_missing() -> None:
    """A batch of two elements, as a default would leave it, has no rank."""
    assert decode_payload(3, pack([TIME_S, []]), Source()).rank is None


def test_hash_forms_join_across_tiers() -> None:
    """Raw host hashes and integer device hashes of one block are one name (vLLM 0.14 to 0.23)."""
    device, host = decoded(array_stored(), array_stored([BYTES_A], None, [], 32, None, "CPU")).events
    assert getattr(device, "hashes", None) == getattr(host, "hashes", None) == (11,)
