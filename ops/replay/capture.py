"""A recording: what an engine published, and the log of what it really did; format in the captures' README."""

import base64
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from schemas.errors import ConfigError

MODEL = "replayed"
"""The model's name in every replay."""


class Frame(msgspec.Struct, frozen=True):
    """One received ZMQ message."""

    number: int  # position in the recording
    step: int  # of the engine, after which it was received
    source: str  # `pub` (`pub0`, `pub1` by rank) or `replay`
    parts: tuple[bytes, ...]

    @property
    def message(self) -> tuple[int, bytes] | None:
        """Return sequence and payload, or None where these are not the parts of a published message."""
        if len(self.parts) != 3 or len(self.parts[1]) != 8:
            return None
        return int.from_bytes(self.parts[1], "big"), self.parts[2]


class Capture(msgspec.Struct, frozen=True):
    """One recorded engine run."""

    name: str
    engine: str
    version: str
    meta: dict[str, Any]
    frames: tuple[Frame, ...]
    log: tuple[dict[str, Any], ...]

    @property
    def rank(self) -> int:
        """Return the data-parallel rank that was recorded."""
        if self.meta.get("publisher_rank") is not None:
            return int(self.meta["publisher_rank"])
        return int((self.meta.get("publisher") or {}).get("dp_rank") or 0)

    @property
    def published(self) -> tuple[Frame, ...]:
        """Return the messages of the PUB sockets, in the order received."""
        return tuple(frame for frame in self.frames if frame.source.startswith("pub"))


def load_capture(folder: Path) -> Capture:
    """Return the recording in a folder.

    Raises:
        ConfigError: a file is missing or not of the format; the message names it and the line.
    """
    meta = _meta(folder / "meta.json")
    engine = next((name for name in ("vllm", "sglang") if meta.get(f"{name}_version")), None)
    if engine is None:
        raise _no_recording(folder / "meta.json", "neither vllm_version nor sglang_version")
    path = folder / "frames.jsonl.gz"
    frames: list[Frame] = []
    for number, line in _lines(path):
        try:
            parts = tuple(base64.b64decode(part, validate=True) for part in line["frames"])
            frames.append(Frame(int(line["i"]), int(line.get("step", -1)), str(line["src"]), parts))
        except (KeyError, TypeError, ValueError) as error:
            raise _no_recording(path, f"line {number}: {error!r}") from error
    log = tuple(line for _, line in _lines(folder / "log.jsonl.gz"))
    return Capture(folder.name, engine, str(meta[f"{engine}_version"]), meta, tuple(frames), log)


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise _no_recording(path, str(error)) from error
    if not isinstance(meta, dict):
        raise _no_recording(path, "no object")
    return meta


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and object."""
    number = 0
    try:
        with gzip.open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                value = orjson.loads(line)
                if not isinstance(value, dict):
                    raise _no_recording(path, f"line {number}: no object")
                yield number, value
    except (OSError, EOFError, zlib.error, orjson.JSONDecodeError) as error:
        raise _no_recording(path, f"at line {number}: {error}") from error


def _no_recording(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: not a recording: {why}")
