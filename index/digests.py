"""The index digest: equal in a relay's mirror, in the memory store and in Redis; pure."""

import struct
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest


def index_digest(blocks: Iterable[tuple[int, int]]) -> int:
    """Return XXH3-64 over the sorted (block_hash u64, residency u16) pairs, little-endian."""
    return xxh3_64_intdigest(b"".join(struct.pack("<QH", *block) for block in sorted(blocks)))
