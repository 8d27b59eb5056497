"""What each engine's version puts on the wire, as far as a message shows its version; pure.

Source: engines/vllm-events.md 1.3 and 1.4 (fields of `distributed/kv_events.py` by release), engines/other-engines.md
1.1 and 1.2 (SGLang).
"""

from typing import Literal

import msgspec

from relays.dialects import parse_version

Encoding = Literal["array", "map"]
Since = tuple[int, ...]

_VLLM_STORED: dict[str, Since] = {
    "block_hashes": (0, 11),
    "parent_block_hash": (0, 11),
    "token_ids": (0, 11),
    "block_size": (0, 11),
    "lora_id": (0, 11),
    "medium": (0, 11),
    "lora_name": (0, 14),
    "extra_keys": (0, 17),
    "group_idx": (0, 20),
    "kv_cache_spec_kind": (0, 22),
    "kv_cache_spec_sliding_window": (0, 22),
    "locality": (0, 26),
    "ownership": (0, 29),
    "session_id": (0, 30),
}
_VLLM_REMOVED: dict[str, Since] = {
    "block_hashes": (0, 11),
    "medium": (0, 11),
    "group_idx": (0, 20),
    "locality": (0, 26),
    "ownership": (0, 29),
}
_SGLANG_STORED: dict[str, Since] = {
    "block_hashes": (0, 4, 7),
    "parent_block_hash": (0, 4, 7),
    "token_ids": (0, 4, 7),
    "block_size": (0, 4, 7),
    "lora_id": (0, 4, 7),
    "medium": (0, 5, 9),
    "cache_salt": (0, 5, 18),
    "session_id": (0, 5, 20),
    "lora_name": (0, 5, 22),
}
_SGLANG_REMOVED: dict[str, Since] = {"block_hashes": (0, 4, 7), "medium": (0, 5, 9)}


class Wire(msgspec.Struct, frozen=True):
    """What messages of one engine version look like."""

    encoding: Encoding
    fields: dict[str, dict[str, Since]]  # by event, in the order of the positional form
    items: dict[str, tuple[int, int]]  # fewest and most of the positional form, with its tag; empty: not told
    replay_parts: int  # of one message that a replay brings


def wire_of(engine: str, version: str) -> Wire | None:
    """Return what a version sends, or None where only the decoder knows the dialect.

    Raises:
        ConfigError: the version is not a number.
    """
    number = parse_version(version)
    if engine == "vllm":
        fields = {"BlockStored": _VLLM_STORED, "BlockRemoved": _VLLM_REMOVED}
        # fields that came with 0.17 or later are left out at the end where they are nil
        items = {
            event: (1 + _since(table, min(number, (0, 16))), 1 + _since(table, number))
            for event, table in fields.items()
        }
        return Wire("map" if number >= (0, 24) else "array", fields, items, 4 if number >= (0, 26) else 3)
    if engine == "sglang":
        fields = {"BlockStored": _SGLANG_STORED, "BlockRemoved": _SGLANG_REMOVED}
        encoding: Encoding = "map" if number >= (0, 5, 20) else "array"
        return Wire(encoding, fields, _sglang_items(number), 4 if number >= (0, 5, 22) else 3)
    return None


def _sglang_items(number: Since) -> dict[str, tuple[int, int]]:
    """Return the lengths of positional events: a nil medium is left out up to 0.5.16, a salt's map is behind it."""
    medium, salt = number >= (0, 5, 9), number >= (0, 5, 18)
    fewest = 7 if number >= (0, 5, 17) else 6
    return {"BlockStored": (fewest, 6 + medium + salt), "BlockRemoved": (fewest - 4, 2 + medium)}


def _since(table: dict[str, Since], number: Since) -> int:
    return sum(since <= number for since in table.values())
