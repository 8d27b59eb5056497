"""A prompt as SGLang's tree keys it: pages of tokens or of EAGLE's pairs, in a namespace, with their hashes; pure.

Source: mem_cache/radix_cache.py RadixKey, mem_cache/utils.py and disaggregation/kv_events.py of the 0.5.23 wheel;
engines/other-engines.md 1.4 and 1.5.
"""

import hashlib
import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ops.simulator.sglang.dialect import Dialect

Page = tuple[int, ...] | tuple[tuple[int, int], ...]
"""The units of one page: tokens, or pairs of neighbouring tokens."""

_SALT_SEED = b"sglang-cache-salt-v1\0"
_NAMESPACE_SEED = b"sglang-kv-event-namespace-v1"
_U32 = 1 << 32


class Namespace(NamedTuple):
    """What must be equal for two prompts to share pages."""

    extra_key: str | None = None  # the caller's own, followed by the adapter's id
    salt: str | None = None
    adapter: str | None = None  # its name


PLAIN = Namespace()


class Key(NamedTuple):
    """A prompt, or what of it is asked about."""

    namespace: Namespace
    pages: list[Page]


def key_of(tokens: Sequence[int], namespace: Namespace, page_size: int, *, pairs: bool) -> Key:
    """Return the whole pages of a prompt; n tokens are n - 1 pairs."""
    units: Sequence[Any] = list(itertools.pairwise(tokens)) if pairs else tokens
    whole = len(units) // page_size * page_size
    return Key(namespace, [tuple(units[at : at + page_size]) for at in range(0, whole, page_size)])


def tokens_of(pages: Sequence[Page]) -> list[int | tuple[int, int]]:
    """Return the units of pages as events list them."""
    return [unit for page in pages for unit in page]


class Hasher:
    """The hashes of one engine: a chain of SHA-256 over pages, and what its events make of it."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def chain(self, namespace: Namespace, before: bytes | None, pages: Sequence[Page]) -> list[bytes]:
        """Return the digests of pages that follow a page (its digest), or begin a prompt (None)."""
        digest = self._root(namespace) if before is None else before
        digests: list[bytes] = []
        for page in pages:
            digest = hashlib.sha256(digest + self._packed(page)).digest()
            digests.append(digest)
        return digests

    def announced(self, namespace: Namespace, digest: bytes) -> int:
        """Return a digest as events carry it: its first eight bytes, signed, mixed with a namespace by format."""
        value = int.from_bytes(digest[:8], "big", signed=True)
        seed = self._seed(namespace)
        if seed is None:
            return value
        mixed = hashlib.sha256(seed + value.to_bytes(8, "big", signed=True)).digest()
        return int.from_bytes(mixed[:8], "big", signed=True)

    def _root(self, namespace: Namespace) -> bytes:
        if namespace.salt is None or not self._dialect.salts:
            return b""
        return hashlib.sha256(_SALT_SEED + namespace.salt.encode()).digest()

    def _packed(self, page: Page) -> bytes:
        flat = [token for unit in page for token in (unit if isinstance(unit, tuple) else (unit,))]
        if self._dialect.wide_tokens and max(flat) >= _U32:
            return b"\xff" + struct.pack(f"<{len(flat)}Q", *flat)
        return struct.pack(f"<{len(flat)}I", *flat)

    def _seed(self, namespace: Namespace) -> bytes | None:
        """Return what tells namespaces of equal tokens apart: all of them by format, else an adapter's alone."""
        extra_key, salt = namespace.extra_key, namespace.salt
        if not self._dialect.namespaced:
            extra_key = extra_key if self._dialect.adapters and namespace.adapter is not None else None
            salt = None
        if extra_key is None and salt is None:
            return None
        parts = [_NAMESPACE_SEED]
        for part in (extra_key, salt):
            encoded = b"" if part is None else part.encode()
            parts.append(b"\0" if part is None else b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
        return hashlib.sha256(b"".join(parts)).digest()
