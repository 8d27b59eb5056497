"""The published block hash: fixed vectors, and what makes two blocks equal or not.

The literals were computed once with XXH3-64 over the bytes that the comments spell out. They are published: a gateway
computes the same, so a change here breaks every caller that sends hashes.
"""

import struct

import pytest
from xxhash import xxh3_64_intdigest

from index.hashing import (
    Media,
    Namespace,
    Tokens,
    chain_hashes,
    pack_hashes,
    pack_tokens,
    root_hash,
    unpack_hashes,
)
from schemas.errors import BadRequest

# "kvatlas/1\0" | u32 0 (no secret) | u32 1 "m" | u32 4 (unit) | 0 (no pairs) | 0 (no adapter) | 0 (no salt)
ROOT = 0x6707CEB35B78F7D3
ROOT_BYTES = bytes.fromhex("6b7661746c61732f3100 00000000 010000006d 04000000 00 00 00")

# u32 1 2 3 4, seeded with ROOT; then 5 6 7 8 seeded with that; then 9 10 11 12
CHAIN = [0x1040F2FE629B457E, 0xDF8FB2828EC2A7F6, 0x8200B56A8961A0D8]


def blocks(token_ids: list[int]) -> list[int]:
    return chain_hashes(ROOT, pack_tokens(token_ids), 4)


def with_media(*media: Media, token_ids: range = range(1, 13)) -> list[int]:
    return chain_hashes(ROOT, pack_tokens(token_ids), 4, media=media)


ROOTS = [
    (Namespace("m", 4), b"", ROOT),
    (Namespace("m", 4), b"s3cret", 0x58A887EE7A7CEA01),  # u32 6 "s3cret" where the 0 stands
    (Namespace("m", 16), b"", 0xEA607D34A8A1210A),
    (Namespace("m", 4, pairs=True), b"", 0xF31C68B6A8E64E04),  # 1 in place of the first 0
    (Namespace("m", 4, adapter="a"), b"", 0xA9BB01ABABB65A7C),  # 1 | u32 1 "a" | 0
    (Namespace("m", 4, salt="a"), b"", 0x6CDF75A8CECBB4E8),  # 0 | 1 | u32 1 "a"
    (Namespace("m", 4, adapter="ab", salt="c"), b"", 0xC5517E801A624B7B),
]


@pytest.mark.parametrize(("namespace", "secret", "expected"), ROOTS)
def test_the_root_of_a_namespace_is_as_published(namespace: Namespace, secret: bytes, expected: int) -> None:
    """A namespace's root is the published number."""
    assert root_hash(namespace, secret) == expected


def test_the_roots_bytes_are_laid_out_as_published() -> None:
    """The root is XXH3-64 over the layout that the comment spells out."""
    assert xxh3_64_intdigest(ROOT_BYTES) == ROOT


def test_a_chain_is_as_published() -> None:
    """Each block's hash is XXH3-64 of its u32 tokens, seeded with the hash before it."""
    assert blocks(list(range(1, 13))) == CHAIN
    assert xxh3_64_intdigest(struct.pack("<4I", 5, 6, 7, 8), CHAIN[0]) == CHAIN[1]


def test_a_last_block_that_is_not_full_has_no_hash() -> None:
    """Tokens after the last whole block change nothing."""
    assert blocks(list(range(1, 12))) == CHAIN[:2]
    assert blocks([1, 2, 3]) == []


def test_equal_prefixes_have_equal_hashes_and_a_difference_stays() -> None:
    """Hashes agree up to the block with the first different token, and differ from there on."""
    other = blocks([1, 2, 3, 4, 5, 6, 7, 99, 9, 10, 11, 12])
    assert other[0] == CHAIN[0]
    assert not set(other[1:]) & set(CHAIN)


def test_a_chain_goes_on_from_any_block() -> None:
    """Hashing the rest from the block before gives what hashing the whole gives."""
    assert chain_hashes(CHAIN[0], pack_tokens(range(5, 13)), 4) == CHAIN[1:]


def test_a_token_beyond_u32_widens_its_block_only() -> None:
    """A block with such a token hashes as flag 1 and u64s; the others hash as ever."""
    # 1 | u64 1 2 3 2^32, seeded with ROOT; then u32 5 6 7 8
    assert blocks([1, 2, 3, 1 << 32, 5, 6, 7, 8]) == [0x77679AFE92138952, 0x1CC9270DF19C162B]
    assert blocks([1, 2, 3, 4, 5, 6, 7, 1 << 32])[0] == CHAIN[0]


def test_wide_packing_does_not_change_a_hash() -> None:
    """Tokens sent as u64 hash like the same tokens sent as u32."""
    wide = Tokens(struct.pack("<12Q", *range(1, 13)), wide=True)
    assert chain_hashes(ROOT, wide, 4) == CHAIN
    assert wide.token_count == 12


def test_a_block_of_pairs_spans_one_token_more() -> None:
    """A block of four pairs hashes five tokens, the last of which starts the next block."""
    root = root_hash(Namespace("m", 4, pairs=True))
    hashes = chain_hashes(root, pack_tokens(range(1, 10)), 4, pairs=True)
    assert hashes == [0xEBB56FFC26EE392A, 0x447054781DEC903A]
    assert xxh3_64_intdigest(struct.pack("<5I", 1, 2, 3, 4, 5), root) == hashes[0]
    assert chain_hashes(root, pack_tokens(range(1, 9)), 4, pairs=True) == hashes[:1]


def test_media_keys_enter_the_blocks_that_they_overlap() -> None:
    """An image over tokens 2 to 4 keys blocks 0 and 1; block 2 differs by its chain alone."""
    # 2 | u32 1 2 3 4 | u32 3 "img" | i64 2; then 2 | u32 5 6 7 8 | u32 3 "img" | i64 -2; then u32 9 10 11 12
    hashes = with_media(Media("img", 2, 3))
    assert hashes == [0xF56E8C67D6AA5965, 0x49B25C50EF0C9DB0, 0x7638EAD67737E2D7]
    key = struct.pack("<I3sq", 3, b"img", -2)
    assert xxh3_64_intdigest(b"\2" + struct.pack("<4I", 5, 6, 7, 8) + key, hashes[0]) == hashes[1]
    assert xxh3_64_intdigest(struct.pack("<4I", 9, 10, 11, 12), hashes[1]) == hashes[2]


def test_media_that_begin_after_a_block_leave_it_alone() -> None:
    """Text before an image is shared by all images, and an image of no tokens is none."""
    assert with_media(Media("img", 4, 4))[0] == CHAIN[0]
    assert with_media(Media("img", 4, 0)) == CHAIN


def test_another_image_or_another_place_is_another_block() -> None:
    """Two ids, and one id at two places, never share a block."""
    ways = [with_media(Media(name, offset, 4))[1] for name, offset in [("a", 4), ("b", 4), ("a", 5)]]
    assert len({*ways, CHAIN[1]}) == 4


def test_spans_that_begin_early_and_end_late_enter_every_block_between() -> None:
    """Of spans that lie over one another each block has the keys of those that touch it, whichever began first."""
    spans = [Media("long", 0, 12), Media("short", 1, 2), Media("late", 5, 7), Media("out", 12, 4)]
    hashed, hashes = ROOT, []
    for first in range(0, 12, 4):
        touching = [span._replace(offset=span.offset - first) for span in spans if span.id != "short" or first == 0]
        (hashed,) = chain_hashes(hashed, pack_tokens(range(first + 1, first + 5)), 4, media=touching)
        hashes.append(hashed)
    assert with_media(*spans) == hashes


def test_the_order_in_which_media_are_named_does_not_count() -> None:
    """Media are sorted by place and id before they are hashed."""
    one, two = Media("a", 4, 2), Media("b", 6, 2)
    assert with_media(one, two) == with_media(two, one)


def test_an_image_that_began_before_these_tokens_keeps_its_place() -> None:
    """Hashing from a later block on takes offsets relative to it, negative ones too."""
    whole = with_media(Media("img", 2, 8))
    rest = chain_hashes(whole[0], pack_tokens(range(5, 13)), 4, media=[Media("img", -2, 8)])
    assert rest == whole[1:]


REFUSED: list[tuple[object, str]] = [
    (-1, r"token_ids\[1\].*got -1"),
    (1 << 63, r"token_ids\[1\].*got 9223372036854775808"),
    (1.5, r"token_ids\[1\].*got 1.5"),
    ("7", r"token_ids\[1\].*got '7'"),
    (None, r"token_ids\[1\].*got None"),
]


@pytest.mark.parametrize(("token", "message"), REFUSED)
def test_a_token_that_is_no_token_is_refused_by_its_place(token: int, message: str) -> None:
    """A negative, huge or non-integer token raises BadRequest that names position and value."""
    with pytest.raises(BadRequest, match=message):
        pack_tokens([1, token, 3])


def test_the_largest_token_is_taken() -> None:
    """2^63 - 1 is a token."""
    assert pack_tokens([(1 << 63) - 1]).wide


def test_hashes_are_packed_little_endian() -> None:
    """Packing is eight little-endian bytes a hash, and unpacking gives the numbers back."""
    assert pack_hashes([1, 1 << 63]) == struct.pack("<2Q", 1, 1 << 63)
    assert unpack_hashes(pack_hashes(CHAIN)) == CHAIN
