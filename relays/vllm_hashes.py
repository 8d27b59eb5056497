"""vLLM's own block hashes, recomputed where seed and algorithm are known; pure.

A block's hash is H(parent hash, tuple of tokens, tuple of extra keys or None), H being SHA-256 over pickle
(protocol 5) or over canonical CBOR; the first parent is H(seed). Source: utils/hashing.py and
v1/core/kv_cache_utils.py, 0.12 to 0.32; equal to every hash of the recordings 0.12.0-plain to 0.32.0-plain.
"""

import hashlib
import pickle

import cbor2

from relays.engine_events import EngineHash, Stored
from schemas.profiles import Profile


class FirstBlockCheck:
    """Tells the hash that an engine gives the first block of a prompt without a salt.

    Used where a version does not announce salts (up to 0.16): another hash there means another namespace.
    """

    def __init__(self, algorithm: str, seed: str, bits: int) -> None:
        self._algorithm = algorithm
        self._bits = bits
        self._root = self._hash(seed)

    def first_block(self, stored: Stored) -> EngineHash | None:
        """Return the engine's name of the event's first block, were there no salt."""
        if stored.media or len(stored.tokens) < stored.block_size:
            return None
        keys = (stored.adapter,) if stored.adapter is not None else None
        digest = self._hash((self._root, tuple(stored.tokens[: stored.block_size]), keys))
        return int.from_bytes(digest[-8:], "big") if self._bits == 64 else digest

    def _hash(self, value: object) -> bytes:
        if self._algorithm == "sha256_cbor":
            return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
        return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def first_block_check(profile: Profile) -> FirstBlockCheck | None:
    """Return the check for an engine that hides salts and whose seed is known, else None."""
    scheme = profile.hash
    if "salt" not in profile.hidden_namespaces or scheme.seed is None:
        return None
    if scheme.algorithm not in ("sha256", "sha256_cbor"):
        return None
    return FirstBlockCheck(scheme.algorithm, scheme.seed, scheme.bits)
