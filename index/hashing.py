"""The published block hash: XXH3-64 chained over a prompt's blocks from a root that hashes the namespace.

Test vectors and the exact byte layout stand in `schemas/README.md`; a gateway may compute the same hashes and
send them instead of tokens.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from schemas.errors import BadRequest

_LAYOUT = b"kvatlas/1\0"
_WIDE = 1  # block layout flags
_MEDIA = 2
_U32_END = 1 << 32
_MAX_TOKEN = (1 << 63) - 1  # SGLang 0.5.23 image sentinels have 62 bits (engines/other-engines.md 1.6)


class Namespace(msgspec.Struct, frozen=True):
    """What must be equal for two engines' KV of equal tokens to be interchangeable."""

    model: str  # its revision is part of the name
    unit: int  # tokens (or pairs) of one block
    pairs: bool = False  # a block of u pairs spans u + 1 tokens
    adapter: str | None = None
    salt: str | None = None


class Media(NamedTuple):
    """One picture, sound or embedding inside a prompt."""

    id: str
    offset: int  # first token it covers, counted from the prompt's start
    length: int  # tokens


class Tokens(NamedTuple):
    """A prompt as little-endian u32, or u64 where a token needs it."""

    data: bytes | memoryview
    wide: bool

    @property
    def token_count(self) -> int:
        """Number of tokens."""
        return len(self.data) // (8 if self.wide else 4)


def pack_tokens(token_ids: Sequence[int]) -> Tokens:
    """Return the tokens packed; u32 unless one of them needs more.

    Raises:
        BadRequest: a token is negative, above 2^63 - 1, or not an integer; the message names its position.
    """
    try:
        return Tokens(_little(array("I", token_ids)), wide=False)
    except (OverflowError, TypeError):
        pass
    for position, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
            raise BadRequest(f"token_ids[{position}]: expected an integer from 0 to 2^63 - 1, got {token!r}")
    return Tokens(_little(array("Q", token_ids)), wide=True)


def root_hash(namespace: Namespace, secret: bytes = b"") -> int:
    """Return the u64 that the first block of this namespace is chained to."""
    parts = [
        _LAYOUT,
        _text(secret),
        _text(namespace.model.encode()),
        namespace.unit.to_bytes(4, "little"),
        b"\1" if namespace.pairs else b"\0",
        _option(namespace.adapter),
        _option(namespace.salt),
    ]
    return xxh3_64_intdigest(b"".join(parts))


def chain_hashes(
    parent: int, tokens: Tokens, unit: int, *, pairs: bool = False, media: Iterable[Media] = ()
) -> list[int]:
    """Return the u64 hash of every whole block of `tokens`, in prompt order.

    Args:
        parent: the hash before the first block: the root, or the hash of the block before these tokens.
        tokens: from a block boundary on; with `pairs`, the token after the last pair belongs to it.
        unit: tokens (pairs) of a block.
        media: offsets are relative to the first of `tokens`, negative where one began earlier.
    Returns:
        len(tokens) // unit hashes, with `pairs` (len(tokens) - 1) // unit.

    Cost: one XXH3 call a block.
    """
    spans = sorted(media, key=lambda m: (m.offset, m.id))
    if tokens.wide or spans:
        return _chain_special(parent, tokens, unit, pairs, spans)
    view = memoryview(tokens.data)
    step = unit * 4
    width = step + 4 if pairs else step
    hashed = parent
    hashes = []
    for start in range(0, len(view) - width + 1, step):
        hashed = xxh3_64_intdigest(view[start : start + width], hashed)
        hashes.append(hashed)
    return hashes


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return the hashes as little-endian u64, 8 bytes each."""
    return _little(array("Q", hashes))


def unpack_hashes(packed: bytes) -> list[int]:
    """Return the u64 hashes of a packed string; the inverse of `pack_hashes`."""
    values = array("Q")
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _chain_special(parent: int, tokens: Tokens, unit: int, pairs: bool, spans: Sequence[Media]) -> list[int]:
    """Hash blocks that may hold media or tokens beyond u32; a block without either hashes as a plain one."""
    size = 8 if tokens.wide else 4
    view = memoryview(tokens.data)
    span_tokens = unit + 1 if pairs else unit
    hashed = parent
    hashes = []
    open_spans: list[Media] = []  # that began before the block's end, and did not end before its start
    begun = 0
    for first in range(0, tokens.token_count - span_tokens + 1, unit):
        block = view[first * size : (first + span_tokens) * size]
        while begun < len(spans) and spans[begun].offset < first + unit:
            open_spans.append(spans[begun])
            begun += 1
        keys = open_spans = [m for m in open_spans if m.offset + m.length > first]
        body, flags = _narrow(block) if tokens.wide else (bytes(block), 0)
        if keys:
            flags |= _MEDIA
        if flags:
            body = bytes([flags]) + body
        for key in keys:
            body += _text(key.id.encode()) + (key.offset - first).to_bytes(8, "little", signed=True)
        hashed = xxh3_64_intdigest(body, hashed)
        hashes.append(hashed)
    return hashes


def _narrow(block: memoryview) -> tuple[bytes, int]:
    """Return the block's u64 tokens as u32 where all of them fit, with the layout flag."""
    values = unpack_hashes(bytes(block))
    if max(values) < _U32_END:
        return _little(array("I", values)), 0
    return bytes(block), _WIDE


def _text(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def _option(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + _text(value.encode())


def _little(values: "array[int]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
