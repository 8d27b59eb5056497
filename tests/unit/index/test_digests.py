"""The index digest, by which mirror, twin and Redis are compared."""

import struct

from xxhash import xxh3_64_intdigest

from index.digests import index_digest


def test_the_digest_does_not_know_any_order() -> None:
    """The same blocks in any order have one digest; XXH3-64 over sorted (u64 hash, u16 residency)."""
    assert index_digest([(2, 3), (1, 1)]) == index_digest([(1, 1), (2, 3)]) == 0x9818C3FDC5317D2C
    assert xxh3_64_intdigest(struct.pack("<QHQH", 1, 1, 2, 3)) == 0x9818C3FDC5317D2C


def test_a_holder_without_blocks_has_the_digest_of_nothing() -> None:
    """No blocks give XXH3-64 of the empty string, a number of its own."""
    assert index_digest([]) == 0x2D06800538D394C2


def test_another_residency_is_another_digest() -> None:
    """The digest covers where a block is, not only that it is there."""
    assert index_digest([(1, 1)]) != index_digest([(1, 2)])
