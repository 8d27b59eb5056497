"""A recording: what an engine published, and the log of what it really did; format in the captures' README."""

import base64
import gzip
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


class Capture(msgspec.Struct, frozen=True):
    """One recorded engine run."""

    name: str
    engine: str
    version: str
    meta: dict[str, Any]
    frames: tuple[Frame, ...]
    log: tuple[dict[str, Any], ...]

    @property
    def published(self) -> tuple[Frame, ...]:
        """Return the messages of the PUB sockets, in the order received."""
        return tuple(frame for frame in self.frames if frame.source.startswith("pub"))


def load_capture(folder: Path) -> Capture:
    """Return the recording in a folder.

    Raises:
        ConfigError: a file is missing or not of the format; the message names it.
    """
    try:
        meta = orjson.loads((folder / "meta.json").read_bytes())
        frames = [
            Frame(
                line["i"], line.get("step", -1), line["src"], tuple(base64.b64decode(part) for part in line["frames"])
            )
            for line in _lines(folder / "frames.jsonl.gz")
        ]
        log = _lines(folder / "log.jsonl.gz")
    except (OSError, orjson.JSONDecodeError, KeyError, ValueError, EOFError) as error:
        raise ConfigError(f"{folder}: not a recording: {error}") from error
    engine = "vllm" if "vllm_version" in meta else "sglang"
    version = meta.get("vllm_version") or meta.get("sglang_version") or ""
    return Capture(folder.name, engine, str(version), meta, tuple(frames), tuple(log))


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as stream:
        return [orjson.loads(line) for line in stream if line.strip()]
