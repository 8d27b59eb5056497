"""The vLLM decoder: what fields mean, and what is refused; its table of payloads is fed in test_payload_tables.py."""

import pytest

from relays.batches import MAX_BLOCK_SIZE
from relays.engine_events import Decoded, RejectReason
from relays.vllm import TIER_SPELLINGS, Source, decode_payload
from tests.support.payloads import array_stored, batch, expected, map_removed, pack
from tests.support.vllm_frames import BYTES_A, map_stored


def decoded(*events: object, source: Source | None = None) -> Decoded:
    return decode_payload(3, pack(batch(*events)), source or Source())


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


def test_hash_forms_join_across_tiers() -> None:
    """Raw host hashes and integer device hashes of one block are one name (vLLM 0.14 to 0.23)."""
    device, host = decoded(array_stored(), array_stored([BYTES_A], None, [], 32, None, "CPU")).events
    assert getattr(device, "hashes", None) == getattr(host, "hashes", None) == (11,)
