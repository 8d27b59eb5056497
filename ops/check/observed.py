"""What an engine's messages look like, counted field by field before any rule is applied; pure."""

from collections import Counter
from typing import Any

import msgspec

_MAX_DISTINCT = 64  # values of one field that are told apart
# the positional form's first items, which no version changed
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED = ("block_hashes", "medium")

_decoder = msgspec.msgpack.Decoder()


class Observed:
    """Counts over all messages of one source; nothing of it depends on the version that was given."""

    def __init__(self) -> None:
        self.messages = 0
        self.unreadable = 0
        self.first: int | None = None
        self.last: int | None = None
        self.missing = 0  # sequences that were skipped
        self.backwards = 0
        self.encodings: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.items: Counter[tuple[str, int]] = Counter()  # (event, length) of the positional form
        self.keys: Counter[tuple[str, str]] = Counter()  # (event, key) with a value, of maps
        self.hashes: Counter[str] = Counter()
        self.block_sizes: Counter[int] = Counter()
        self.mediums: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()

    def take(self, sequence: int, payload: bytes) -> None:
        """Look at one message; whatever it is, nothing is raised."""
        self._sequence(sequence)
        self.messages += 1
        try:
            batch = _decoder.decode(payload)
            events = list(batch[1])
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError):
            self.unreadable += 1
            return
        for event in events:
            self._event(event)

    def _sequence(self, sequence: int) -> None:
        if self.last is None:
            self.first = sequence
        elif sequence > self.last + 1:
            self.missing += sequence - self.last - 1
        elif sequence <= self.last:
            self.backwards += 1
        self.last = sequence

    def _event(self, event: Any) -> None:
        if isinstance(event, dict):
            name = str(event.get("type"))
            self.encodings["map"] += 1
            for key, value in event.items():
                if key != "type" and value is not None:
                    _count(self.keys, (name, str(key)))
            fields = event
        elif isinstance(event, list) and event:
            name = str(event[0])
            self.encodings["array"] += 1
            _count(self.items, (name, len(event)))
            fields = dict(zip(_REMOVED if name == "BlockRemoved" else _STORED, event[1:], strict=False))
        else:
            _count(self.events, "no event")
            return
        _count(self.events, name)
        self._fields(name, fields)

    def _fields(self, name: str, fields: dict[str, Any]) -> None:
        for value in fields.get("block_hashes") or ():
            self.hashes[_form(value)] += 1
        if name == "BlockStored" and isinstance(size := fields.get("block_size"), int):
            _count(self.block_sizes, size)
        if name in ("BlockStored", "BlockRemoved"):
            _count(self.mediums, str(fields.get("medium")))
        if fields.get("kv_cache_spec_kind"):
            _count(self.kinds, str(fields["kv_cache_spec_kind"]))


def _form(value: object) -> str:
    if isinstance(value, int):
        return "signed 64-bit" if value < 0 else "unsigned 64-bit" if value >= 1 << 63 else "63-bit"
    return f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__


def _count(counter: "Counter[Any]", value: object) -> None:
    if value in counter or len(counter) < _MAX_DISTINCT:
        counter[value] += 1
