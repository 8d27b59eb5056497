"""What vLLM itself calls the blocks of a prompt, computed as the engine does; equal to all that was recorded.

H(parent, tokens, extra keys or None), H being SHA-256 over pickle; the first parent is H(seed). Extra keys are an
adapter's name, and in a prompt's first block its salt, as up to 0.17; without either the form is the same to 0.32.
Source: v1/core/kv_cache_utils.py (hash_block_tokens).
"""

import hashlib
import pickle
from collections.abc import Sequence


def names_of(
    tokens: Sequence[int], unit: int, seed: str, *, salt: str | None = None, adapter: str | None = None
) -> list[int]:
    """Return the low 64 bits of each whole block's name."""
    parent = _hash(seed)
    names: list[int] = []
    for start in range(0, len(tokens) // unit * unit, unit):
        keys = tuple(key for key in (adapter, salt if start == 0 else None) if key is not None)
        parent = _hash((parent, tuple(tokens[start : start + unit]), keys or None))
        names.append(int.from_bytes(parent[-8:], "big"))
    return names


def _hash(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
