"""Recordings on disk."""

import base64
import gzip
from pathlib import Path

import orjson
import pytest

from ops.replay.capture import load_capture
from schemas.errors import ConfigError


def write(folder: Path, meta: object, frames: list[object], log: list[object]) -> Path:
    (folder / "meta.json").write_bytes(orjson.dumps(meta))
    for name, lines in (("frames", frames), ("log", log)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wb") as stream:
            stream.write(b"\n".join(orjson.dumps(line) for line in lines) + b"\n\n")
    return folder


def frame(number: int, source: str) -> dict[str, object]:
    return {"i": number, "step": 3, "src": source, "frames": [base64.b64encode(part).decode() for part in (b"t", b"s")]}


def test_a_recording_is_read_with_its_raw_parts(tmp_path: Path) -> None:
    """Messages come with step, socket and decoded parts; replays are not published ones."""
    folder = write(tmp_path, {"vllm_version": "0.32.0"}, [frame(0, "pub"), frame(1, "replay")], [{"ev": "note"}])
    capture = load_capture(folder)
    assert (capture.engine, capture.version, capture.name) == ("vllm", "0.32.0", tmp_path.name)
    assert [(f.number, f.step, f.source, f.parts) for f in capture.published] == [(0, 3, "pub", (b"t", b"s"))]
    assert len(capture.frames) == 2
    assert capture.log == ({"ev": "note"},)


def test_what_is_no_recording_is_refused_by_its_path(tmp_path: Path) -> None:
    """An empty folder, broken JSON, a cut-off archive and a frame without parts raise ConfigError."""
    with pytest.raises(ConfigError, match="not a recording"):
        load_capture(tmp_path)
    write(tmp_path, {}, [{"i": 0}], [])
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_capture(tmp_path)
    write(tmp_path, {}, [frame(0, "pub")], [])
    archive = tmp_path / "log.jsonl.gz"
    archive.write_bytes(archive.read_bytes()[:-4])
    with pytest.raises(ConfigError):
        load_capture(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ConfigError):
        load_capture(tmp_path)
