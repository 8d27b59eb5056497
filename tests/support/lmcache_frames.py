"""What tests/data/lmcache holds, and records of our own in few words."""

import base64
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relays.lmcache_mp import KvBatch, decode_lmcache
from schemas.lmcache_mp import KVEventBatch

FOLDER = Path(__file__).parents[1] / "data" / "lmcache"
MODEL = "tiny"
CHUNK = 256


class Lookup(msgspec.Struct):
    """A prompt, and the chunks of it that LMCache found."""

    tokens: list[int]
    chunks: int


class Line(msgspec.Struct):
    """One line of a recording."""

    subscribe: dict[str, Any] | None = None
    frame: str = ""
    end: str = ""
    lookup: Lookup | None = None
    note: str = ""

    @property
    def payload(self) -> bytes:
        """The message's bytes."""
        return base64.b64decode(self.frame)


def recorded(name: str) -> list[Line]:
    """Return the lines of a recording, without the first."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz") as lines:
        return [msgspec.json.decode(line, type=Line) for line in lines][1:]


def frames(*names: str) -> list[bytes]:
    """Return the messages of recordings."""
    return [line.payload for name in names for line in recorded(name) if line.frame]


def read(payload: bytes, model: str = MODEL, chunk: int = CHUNK) -> KvBatch:
    """Return what a message says."""
    return decode_lmcache(payload, model, chunk, 1.5)


def event(kind: str = "stored", *names: bytes, **fields: Any) -> dict[str, Any]:
    """Return a record; without names it is about one chunk of four tokens."""
    plain: dict[str, Any] = {"medium": "CPU", "model_name": MODEL, "block_hashes": list(names) or [name(1)]}
    if kind == "stored":
        plain["token_ids"] = [1, 2, 3, 4]
    return {"kind": kind, **plain, **fields}


def message(*events: dict[str, Any], numbers: Sequence[int] = (), **fields: Any) -> bytes:
    """Return an encoded batch; records are numbered from 1 unless `numbers` says otherwise."""
    numbered = [{"seq": numbers[n] if numbers else n + 1, **event} for n, event in enumerate(events)]
    fields = {"enabled": True, "incarnation": 7, "next_cursor": max([len(events), *numbers]), **fields}
    return bytes(KVEventBatch(events=numbered, **fields).SerializeToString())


def name(number: int) -> bytes:
    """Return a chunk's name."""
    return number.to_bytes(32, "big")
