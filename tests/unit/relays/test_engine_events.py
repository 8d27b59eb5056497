"""What decoders conclude: one form for every hash, and stores that leave blocks out."""

import pytest

from relays.engine_events import Reject, RejectReason, Stored, normalize_hash
from tests.support.engines import stored, tokens

NAME = bytes(range(32))

FORMS = [
    (5, 64, 5),
    (-5, 64, (1 << 64) - 5),
    ((1 << 64) - 5, 64, (1 << 64) - 5),
    (-484813614762822561, 64, 17961930458946729055),  # case A02
    (NAME, 64, int.from_bytes(NAME[-8:], "big")),
    (NAME, 256, NAME),
    (5, 256, 5),
]


@pytest.mark.parametrize(("said", "bits", "kept"), FORMS)
def test_a_hash_is_a_64_bit_pattern_or_kept_whole(said: int | bytes, bits: int, kept: int | bytes) -> None:
    """Signed and unsigned forms are one pattern; longer names are cut only where the profile says 64 bits."""
    assert normalize_hash(said, bits) == kept


def test_opposite_numbers_are_two_hashes() -> None:
    """5 and -5 are different patterns (case A02)."""
    assert normalize_hash(5, 64) != normalize_hash(-5, 64)


MASKS = [
    (stored([1, 2], tokens(2)), False),
    (stored([1], tokens(2)), True),
    (stored([], tokens(1)), True),
    (stored([1], []), False),  # hashes only
    (stored([1], [1, 2, 3, 4, 5], pairs=True), False),
    (stored([1], [1, 2, 3, 4, 5, 6, 7, 8, 9], pairs=True), True),
]


@pytest.mark.parametrize(("event", "masked"), MASKS)
def test_a_store_with_fewer_hashes_than_blocks_is_masked(event: Stored, masked: bool) -> None:
    """A store is masked where its tokens fill more blocks than it names."""
    assert event.masked is masked


def test_a_reason_is_its_metric_label() -> None:
    """A refusal's reason is text in lower case with underscores."""
    reject = Reject(RejectReason.TOKEN_COUNT, 3, "token_ids: 3 for 1 blocks of 4")
    assert f"{reject.reason}" == "token_count"
    assert all(reason.islower() and reason.replace("_", "").isalpha() for reason in RejectReason)
