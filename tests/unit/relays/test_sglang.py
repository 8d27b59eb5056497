"""The SGLang decoder: what fields mean, and what is refused; its table of payloads is fed in test_payload_tables.py."""

import pytest

from relays.batches import MAX_BLOCK_SIZE
from relays.engine_events import Decoded, RejectReason
from relays.sglang import TIER_SPELLINGS, Source, decode_payload, unfold_pairs
from tests.support.payloads import TOP, array_stored, batch, expected, map_removed, pack
from tests.support.sglang_frames import PAIRS, TOKENS, map_stored


def decoded(*events: object, source: Source | None = None) -> Decoded:
    return decode_payload(3, pack(batch(*events)), source or Source())


# ---- fields


SPELLINGS = [*TIER_SPELLINGS.items(), ("VRAM?", "other"), ("gpu", "other"), ("CPU", "other")]


@pytest.mark.parametrize(("spelling", "tier"), SPELLINGS)
def test_a_medium_is_a_tier_by_its_known_spellings(spelling: str | None, tier: str) -> None:
    """Each known spelling is its tier, and a spelling that nobody knows is `other`, never the GPU."""
    stored, gone = decoded(map_stored(medium=spelling), map_removed(medium=spelling)).events
    assert getattr(stored, "tier", None) == getattr(gone, "tier", None) == tier


@pytest.mark.parametrize(("spelling", "tier"), [("DISK", "disk"), ("EXTERNAL", "pool")])
def test_a_silent_demotion_is_the_device_tiers_alone(spelling: str, tier: str) -> None:
    """Where the device tier is uncertain, the tiers behind it are what they say."""
    (stored,) = decoded(map_stored(medium=spelling), source=Source(gpu_tier="host")).events
    assert getattr(stored, "tier", None) == tier


def test_signed_and_unsigned_forms_are_one_name() -> None:
    """-5 and 2^64 - 5 name one page, in stores, parents and removals."""
    signed, unsigned, gone = decoded(
        map_stored(block_hashes=[-5]),
        map_stored(block_hashes=[TOP], parent_block_hash=-5),
        map_removed(block_hashes=[-5]),
    ).events
    assert (
        getattr(signed, "hashes", None) == getattr(unsigned, "hashes", None) == getattr(gone, "hashes", None) == (TOP,)
    )
    assert getattr(unsigned, "parent", None) == TOP


def test_pairs_are_unfolded_to_the_tokens_they_share() -> None:
    """The first of every pair and the second of the last: one token more than there are pairs."""
    assert unfold_pairs(list(PAIRS), 4) == ([1, 2, 3, 4, 5], True)
    assert unfold_pairs(list(TOKENS), 4) == ([1, 2, 3, 4], False)
    assert unfold_pairs([], 4) == ([], False)


def test_an_adapters_id_means_nothing() -> None:
    """`lora_id` is never filled by an engine; a name is the only adapter."""
    (stored,) = decoded(map_stored(lora_id=7)).events
    assert stored == expected()


# ---- refusals


REFUSED = [
    ("an unknown event", {"type": "BlockExploded"}, RejectReason.UNKNOWN_EVENT),
    ("an unknown array event", ["BlockExploded"], RejectReason.UNKNOWN_EVENT),
    ("a number", 7, RejectReason.MALFORMED),
    ("a map without a type", {"block_hashes": [1]}, RejectReason.MALFORMED),
    ("an empty array", [], RejectReason.MALFORMED),
    ("a store without tokens", ["BlockStored", [1], None], RejectReason.MALFORMED),
    ("a map store without block size", {
        key: value for key, value in map_stored().items() if key != "block_size"}, RejectReason.MALFORMED),
    ("a hash that is text", array_stored(["11"]), RejectReason.MALFORMED),
    ("a hash that is bytes", array_stored([b"12345678"]), RejectReason.MALFORMED),
    ("a parent that is text", map_stored(parent_block_hash="11"), RejectReason.MALFORMED),
    ("a token that is text", array_stored([11], None, ["1"] * 4), RejectReason.MALFORMED),
    ("a token that is a fraction", array_stored([11], None, [1.5] * 4), RejectReason.MALFORMED),
    ("a token that is a truth value", array_stored([11], None, [True] * 4), RejectReason.MALFORMED),
    ("a pair of three", map_stored(token_ids=[(1, 2, 3)], block_size=1), RejectReason.MALFORMED),
    ("a pair of one", map_stored(token_ids=[(1,)], block_size=1), RejectReason.MALFORMED),
    ("a pair with text", map_stored(token_ids=[(1, "2")], block_size=1), RejectReason.MALFORMED),
    ("a medium that is a number", map_stored(medium=1), RejectReason.MALFORMED),
    ("a salt that is a number", map_stored(cache_salt=7), RejectReason.MALFORMED),
    ("an adapter that is a number", map_stored(lora_name=7), RejectReason.MALFORMED),
    ("no tokens for a page", array_stored([11], None, []), RejectReason.TOKEN_COUNT),
    ("three tokens for a page of four", array_stored([11], None, [1] * 3), RejectReason.TOKEN_COUNT),
    ("more pages than tokens fill", array_stored([11, 12], None, [1] * 4), RejectReason.TOKEN_COUNT),
    ("fewer pages than tokens fill", array_stored([11], None, [1] * 8), RejectReason.TOKEN_COUNT),
    ("three pairs for a page of four", map_stored(token_ids=PAIRS[:3]), RejectReason.TOKEN_COUNT),
    ("a token behind pairs", map_stored(token_ids=[*PAIRS[:3], 4]), RejectReason.TOKEN_COUNT),
    ("a pair behind tokens", map_stored(token_ids=[1, 2, 3, (4, 5)]), RejectReason.TOKEN_COUNT),
    ("pairs that do not follow", map_stored(token_ids=[(1, 2), (3, 4)], block_size=2), RejectReason.TOKEN_COUNT),
    ("block size 0", array_stored([11], None, TOKENS, 0), RejectReason.BLOCK_SIZE),
    ("block size 0 with pairs", map_stored(token_ids=PAIRS, block_size=0), RejectReason.BLOCK_SIZE),
    ("a negative block size", array_stored([11], None, TOKENS, -4), RejectReason.BLOCK_SIZE),
    ("a huge block size", array_stored([11], None, TOKENS, MAX_BLOCK_SIZE + 1), RejectReason.BLOCK_SIZE),
    ("a negative token", array_stored([11], None, [1, 1, 1, -1]), RejectReason.TOKEN_RANGE),
    ("a token of 64 bits", array_stored([11], None, [1, 1, 1, 1 << 63]), RejectReason.TOKEN_RANGE),
    ("a negative token in a pair", map_stored(token_ids=[(-1, 2)], block_size=1), RejectReason.TOKEN_RANGE),
    ("a negative last token of pairs", map_stored(token_ids=[(1, -2)], block_size=1), RejectReason.TOKEN_RANGE),
    ("a last token of pairs of 64 bits", map_stored(token_ids=[(1, 1 << 63)], block_size=1), RejectReason.TOKEN_RANGE),
    ("a name where 0.5.18 has a map", array_stored([11], None, TOKENS, 4, None, "GPU", "sql"), RejectReason.MALFORMED),
    ("an empty map there", array_stored([11], None, TOKENS, 4, None, "GPU", {}), RejectReason.EXTRA_KEYS),
    ("another key there", array_stored(
        [11], None, TOKENS, 4, None, "GPU", {"cache_salt": "a", "more": 1}), RejectReason.EXTRA_KEYS),
    ("a salt there that is no text", array_stored(
        [11], None, TOKENS, 4, None, "GPU", {"cache_salt": 7}), RejectReason.EXTRA_KEYS),
]  # fmt: skip


@pytest.mark.parametrize(("event", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_bad_event_costs_only_itself(event: object, reason: RejectReason) -> None:
    """An event that cannot be right is refused with its reason and place, and its neighbours are applied."""
    result = decoded(array_stored(), event, map_stored())
    assert list(result.events) == [expected(), expected()]
    assert [(reject.reason, reject.position) for reject in result.rejects] == [(reason, 1)]


def test_a_refusal_never_shows_tokens_or_salts() -> None:
    """The detail of a refusal names fields and sizes, not what a prompt or a tenant said."""
    secret = "tenant-7-secret"
    result = decoded(
        array_stored([11], None, TOKENS, 4, None, "GPU", {"cache_salt": secret, "of": secret}),
        array_stored([11], None, [1, 2, 987654321, -1]),
        map_stored(token_ids=[(1, 2), (987654321, 4)], block_size=2),
        map_stored(token_ids=[(1, 2), (2, -987654321)], block_size=2),
    )
    text = " ".join(reject.detail for reject in result.rejects)
    assert len(result.rejects) == 4
    assert secret not in text
    assert "987654321" not in text
