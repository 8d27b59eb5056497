"""The sample of a public trace, and prompts made of it."""

import gzip
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files

import numpy as np
import orjson
from numpy.typing import NDArray

_BLOCK_TOKENS = 512  # of one id in the trace
_VOCABULARY = 32_000


Tokens = NDArray[np.uint32]


def prompts() -> Iterator[Tokens]:
    """Yield the sample's prompts in order, as token ids; prompts that share ids share tokens."""
    data = files("ops.demo").joinpath("trace.jsonl.gz").read_bytes()
    for line in gzip.decompress(data).splitlines():
        _, length, block_ids = orjson.loads(line)
        yield np.concatenate([_tokens_of(block_id) for block_id in block_ids])[:length]


@lru_cache(maxsize=8192)
def _tokens_of(block_id: int) -> Tokens:
    return np.random.default_rng(block_id).integers(_VOCABULARY, size=_BLOCK_TOKENS, dtype=np.uint32)
