"""Mooncake master's KV event wire format (commit 3b5a594, 2026-08-22).

Source: engines/other-engines.md 4.1; samples are constructed from the schema, none was captured. A message has three
parts: an empty topic, sequence (8 bytes, big-endian, from 1), payload `[ts in integer milliseconds, events, 0]`.
"""

import msgspec


class ObjectEvent(msgspec.Struct):
    """One object of the store came or went; fields that are always nil are left out here.

    `event_type` and `type` say the same in two words; the alias `type` can be switched off.
    """

    event_type: str | None = None  # stored, removed
    type: str | None = None  # BlockStored, BlockRemoved
    medium: str | None = None  # cpu, disk
    object_key: str | None = None  # can be switched off
    seq_hashes: list[int] = []  # the key as a number, where it is decimal or 0x-hexadecimal; else empty
    block_hashes: list[int] = []  # the same value, signed
    tenant_id: str | None = None
    backend_id: str | None = None
    group_id: str | None = None


class ObjectBatch(msgspec.Struct, array_like=True):
    """Up to 64 events."""

    ts_ms: int
    events: list[msgspec.Raw]
    rank: int = 0
