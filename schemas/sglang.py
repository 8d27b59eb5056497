"""SGLang's KV event wire format, 0.4.7 to 0.5.23: arrays up to 0.5.19, maps from 0.5.20.

Source: the PyPI wheels named in engines/other-engines.md 1.2 and 1.3, and recorded frames of 0.5.5 to 0.5.23.
Message and batch are framed as vLLM's (schemas/vllm.py, schemas/batches.py).
"""

from typing import Any

import msgspec


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """Pages of one radix-tree node are cached.

    | position | field | since |
    | --- | --- | --- |
    | 1-5 | block_hashes, parent_block_hash, token_ids, block_size, lora_id | 0.4.7 |
    | 6 | medium | 0.5.9, absent if unset up to 0.5.16 |
    | 7 | a map {cache_salt}, root stores only | 0.5.18 and 0.5.19 |

    In maps the fields from `medium` on are left out when unset; `cache_salt` and `lora_name` are on every store of
    a namespaced chain from 0.5.20 and 0.5.23 on (0.5.22: the name in the `dynamo` format alone). `lora_id` is never
    filled.
    """

    block_hashes: list[int]  # signed; one a page, parent to child
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]  # EAGLE: pairs of neighbouring tokens
    block_size: int  # page_size x decode context parallel size
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockStoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    """The positional form; its item 7 means other things in vLLM under the same tag."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    namespace: dict[str, Any] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    """Copies of pages are gone; every page is listed, none is implied."""

    block_hashes: list[int]
    medium: str | None = None


class BlockRemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """The positional form of `BlockRemoved`."""


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The cache of this rank was flushed: device and host, not the storage behind them."""


class AllBlocksClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """The positional form of `AllBlocksCleared`."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
ArrayEvent = BlockStoredArray | BlockRemovedArray | AllBlocksClearedArray
