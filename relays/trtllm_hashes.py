"""TensorRT-LLM's own block names, recomputed to find adapters and salts that its events hide; pure.

**v1_block_key** (V1 manager; V2's default), 64 bits. `mix(s, x) = s ^ (x + (s << 6) + (s >> 2))`; a value goes in
scrambled, plus 0x9e3779b9, 32-bit values wrapping at 32 bits. It starts with the number of tokens ^ the parent's name
* 0xbf58476d1ce4e5b9, parent 0 at the root; then come the salt's id (root only), each token (32 bits) and the adapter's
id (every block). Extra ids and multimodal keys go in there too; blocks with those earn nothing and are not recomputed.
The salt's id is the first 8 bytes, little-endian, of its SHA-256 (V2), or libstdc++'s `std::hash` of it (V1).

**v2_sha256**: SHA-256 of the parent's digest and the tokens, little-endian; the root's digest is SHA-256 of its
namespace. v2_sha256_64 says the first 8 bytes of a digest, big-endian; ZMQ the last 8.

Source: TensorRT-LLM's blockKey.cpp @0bd2980d, kv_cache_hash.py @991de58c, kv_cache_manager_v2/_block_radix_tree.py
@065ff9e9 (tokens of 4 bytes; the first releases: 8). v1_block_key equals the names in captures/trtllm; std::hash was
compared with g++ 12's. No V2 digest of a running engine was at hand.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from relays.engine_events import EngineHash

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B9
_SCRAMBLE_32 = np.uint32(0x45D9F3B)
_PARENT = _SCRAMBLE_64 = 0xBF58476D1CE4E5B9
_SCRAMBLE_64_AGAIN = 0x94D049BB133111EB
_SPELLINGS: dict[str, Callable[[bytes], EngineHash]] = {
    "v2_sha256": bytes,
    "v2_sha256_64": lambda digest: int.from_bytes(digest[:8], "big"),
    "v2_sha256_low64": lambda digest: int.from_bytes(digest[-8:], "big"),  # our name for what ZMQ says
}
"""How an algorithm's names are made of its digests."""
_MURMUR = 0xC6A4A7935BD1E995
_MURMUR_SEED = 0xC70F6907


def v1_names(
    tokens: Sequence[int],
    block_size: int,
    parent: int = 0,
    *,
    salt_id: int | None = None,
    adapter_id: int | None = None,
) -> Iterator[int]:
    """Yield v1_block_key of each block in turn; only whole blocks, tokens of 32 bits."""
    scrambled = _scramble_tokens(tokens)
    for start in range(0, len(scrambled) - block_size + 1, block_size):
        name = block_size ^ (parent * _PARENT & _U64)
        if parent == 0 and salt_id is not None:
            name = _mix(name, _scramble_id(salt_id))
        for token in scrambled[start : start + block_size]:
            name ^= (token + (name << 6) + (name >> 2)) & _U64
        if adapter_id is not None:
            name = _mix(name, _scramble_id(adapter_id))
        yield name
        parent = name


def salt_ids(salt: str) -> tuple[int, int]:
    """Return the numbers that stand for a salt: in V2's events, and in V1's."""
    text = salt.encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little"), _std_hash(text)


def v2_first_digests(
    tokens: Sequence[int], *, salt_id: int | None = None, adapter_id: int | None = None
) -> Iterator[bytes]:
    """Yield the digests that the releases known here give a prompt's first block; tokens of 31 bits."""
    ids = [None if part is None else part & _U64 for part in (adapter_id, salt_id)]
    scope = bytes([sum((part is not None) << n for n, part in enumerate(ids))])
    scope += b"".join(part.to_bytes(8, "little") for part in ids if part is not None)
    first_releases = b"" if ids[0] is None else ids[0].to_bytes(8, "little")
    for root in (scope, first_releases):
        for width in (4, 8):
            body = np.asarray(tokens, dtype=f"<u{width}").tobytes()
            yield hashlib.sha256(hashlib.sha256(root).digest() + body).digest()


def count_named(
    names: Sequence[EngineHash],
    tokens: Sequence[int],
    block_size: int,
    parent: EngineHash | None,
    *,
    algorithm: str,
    salt: str | None = None,
    adapter_id: int | None = None,
) -> int:
    """Return how many leading blocks bear the names that their tokens give in this namespace.

    Digests go through a whole chain, so of those only a prompt's first block is looked at; v1_block_key takes the
    adapter in at every block, and every block is. Names of another algorithm are nobody's.
    """
    ids: Sequence[int | None] = (None,) if salt is None or parent is not None else salt_ids(salt)
    if algorithm == "v1_block_key":
        if isinstance(parent, bytes) or any(isinstance(name, bytes) for name in names):
            return 0
        return max(_count_v1(names, tokens, block_size, parent or 0, salt_id, adapter_id) for salt_id in ids)
    spell = _SPELLINGS.get(algorithm)
    if spell is None:
        return 0
    if parent is not None or not names:
        return len(names)
    first = tokens[:block_size]
    digests = [d for salt_id in ids for d in v2_first_digests(first, salt_id=salt_id, adapter_id=adapter_id)]
    return len(names) if names[0] in [spell(digest) for digest in digests] else 0


def _count_v1(
    names: Sequence[EngineHash],
    tokens: Sequence[int],
    block_size: int,
    parent: int,
    salt_id: int | None,
    adapter_id: int | None,
) -> int:
    expected = v1_names(tokens, block_size, parent, salt_id=salt_id, adapter_id=adapter_id)
    for number, (name, known) in enumerate(zip(names, expected, strict=False)):
        if name != known:
            return number
    return len(names)


def _scramble_tokens(tokens: Sequence[int]) -> list[int]:
    values = np.asarray(tokens, dtype=np.int64).astype(np.uint32)  # wraps, as the cast there does
    for _ in range(2):
        values = ((values >> np.uint32(16)) ^ values) * _SCRAMBLE_32
    values = (values >> np.uint32(16)) ^ values
    scrambled: list[int] = (values + np.uint32(_GOLDEN)).tolist()
    return scrambled


def _scramble_id(value: int) -> int:
    value &= _U64
    value = (value ^ (value >> 30)) * _SCRAMBLE_64 & _U64
    value = (value ^ (value >> 27)) * _SCRAMBLE_64_AGAIN & _U64
    return (value ^ (value >> 31)) + _GOLDEN


def _mix(name: int, value: int) -> int:
    return name ^ ((value + (name << 6) + (name >> 2)) & _U64)


def _std_hash(text: bytes) -> int:
    """Return libstdc++'s hash of a string on 64-bit machines: MurmurHash64A with a fixed seed."""
    value = _MURMUR_SEED ^ (len(text) * _MURMUR & _U64)
    for start in range(0, len(text), 8):
        part = int.from_bytes(text[start : start + 8], "little")
        if start + 8 <= len(text):  # a short rest goes in as it is
            part = part * _MURMUR & _U64
            part = (part ^ (part >> 47)) * _MURMUR & _U64
        value = (value ^ part) * _MURMUR & _U64
    value = (value ^ (value >> 47)) * _MURMUR & _U64
    return value ^ (value >> 47)
