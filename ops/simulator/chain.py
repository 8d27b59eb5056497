"""vLLM's own hashes of a request's blocks; pure.

A block's hash is SHA-256 over the pickle of (parent hash, tuple of tokens, tuple of extra keys or None); the first
parent is the hash of the seed. Source: utils/hashing.py and v1/core/kv_cache_utils.py, 0.12 to 0.32. This is written
apart from relays/vllm_hashes.py on purpose: a test compares the two.
"""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import msgspec

DEFAULT_SEED = "vllm-none-hash"
"""What 0.30 and newer take where PYTHONHASHSEED is unset."""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as vLLM knows it."""

    name: str
    number: int  # of loading, from 1
    path: str


class HashScheme(msgspec.Struct, frozen=True):
    """What one engine's hashes depend on beside the content."""

    root: bytes
    block_size: int  # tokens
    tagged_keys: bool


def root_of(seed: str) -> bytes:
    """Return the hash that stands before every prompt's first block."""
    return _sha256(seed)


def announced(block_hash: bytes) -> int:
    """Return the hash as events carry it: its low 64 bits, unsigned."""
    return int.from_bytes(block_hash[-8:], "big")


class Chain:
    """The tokens of one request so far, and the hashes of its whole blocks."""

    __slots__ = ("_scheme", "adapter", "hashes", "salt", "tokens")

    def __init__(
        self, scheme: HashScheme, tokens: Sequence[int], *, adapter: Adapter | None = None, salt: str | None = None
    ) -> None:
        self._scheme = scheme
        self.adapter = adapter
        self.salt = salt
        self.tokens = list(tokens)
        self.hashes: list[bytes] = []
        self._extend()

    def append(self, token: int) -> None:
        """Add a generated token, and the hash of the block that it fills."""
        self.tokens.append(token)
        self._extend()

    def announced_keys(self, first: int, last: int) -> list[tuple[str, ...] | None]:
        """Return what events say of the extra keys of blocks [first, last): values without their kind."""
        keys = [self._keys(block) for block in range(first, last)]
        return [None if not block else tuple(key[1] for key in block) for block in keys]

    def _extend(self) -> None:
        size = self._scheme.block_size
        for block in range(len(self.hashes), len(self.tokens) // size):
            parent = self.hashes[-1] if self.hashes else self._scheme.root
            keys = self._keys(block)
            hashed: Any = tuple(keys) if self._scheme.tagged_keys else tuple(key[1] for key in keys)
            self.hashes.append(_sha256((parent, tuple(self.tokens[block * size : (block + 1) * size]), hashed or None)))

    def _keys(self, block: int) -> list[tuple[str, ...]]:
        """Return a block's tagged keys: the adapter in every block, the salt in a prompt's first."""
        keys: list[tuple[str, ...]] = []
        if self.adapter is not None:
            keys.append(("lora", self.adapter.name, self.adapter.path))
        if self.salt and block == 0:
            keys.append(("cache_salt", self.salt))
        return keys


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
