"""llm-d's filesystem offload publisher (llm-d-kv-cache 7be76e1, 2026-06-12).

Source: engines/other-engines.md 7.2 and recorded frames of the publisher's class. A message has three parts: topic
`kv@SHARED_STORAGE@<model>` or `kv@OBJECT_STORE@<model>`, sequence (8 bytes, big-endian, from 1 and shared by all topics
of a process), payload `[ts, [bin, ...]]`, each bin a packed positional event.
"""

import msgspec


class FileStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """Files were written; a hash names a file, which is the chunk of blocks that ends there."""

    block_hashes: list[int]  # low 64 bits of vLLM's hash
    parent_block_hash: int | None = 0  # always 0: unknown
    token_ids: list[int] = []  # always empty
    block_size: int = 0  # always 0
    lora_id: int | None = None
    medium: str | None = None


class FileRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    """Files were evicted, by a process with a counter of its own."""

    block_hashes: list[int]
    medium: str | None = None


FileEvent = FileStored | FileRemoved


class FileBatch(msgspec.Struct, array_like=True):
    """Events packed twice."""

    ts: float
    events: list[bytes]
