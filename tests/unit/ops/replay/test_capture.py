"""Recordings on disk."""

import base64
import gzip
from pathlib import Path

import orjson
import pytest

from ops.replay.capture import Frame, load_capture
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


VERSION = {"sglang_version": "0.5.23"}
BROKEN = [
    ([], [frame(0, "pub")], [], r"meta\.json: .*no object"),
    ({}, [frame(0, "pub")], [], r"meta\.json: .*neither vllm_version nor sglang_version"),
    (VERSION, [frame(0, "pub"), {"i": 1}], [], r"frames\.jsonl\.gz: .*line 2: KeyError\('frames'\)"),
    (VERSION, [{**frame(0, "pub"), "frames": ["?"]}], [], r"frames\.jsonl\.gz: .*line 1: .*base64"),
    (VERSION, [{**frame(0, "pub"), "frames": 7}], [], r"frames\.jsonl\.gz: .*line 1: TypeError"),
    (VERSION, [], [{"op": "start"}, 7], r"log\.jsonl\.gz: .*line 2: no object"),
]


@pytest.mark.parametrize(("meta", "frames", "log", "message"), BROKEN)
def test_a_broken_line_is_named(
    tmp_path: Path, meta: object, frames: list[object], log: list[object], message: str
) -> None:
    """The error says which file, which line and what is wrong there."""
    with pytest.raises(ConfigError, match=message):
        load_capture(write(tmp_path, meta, frames, log))


def test_an_archive_broken_inside_is_refused(tmp_path: Path) -> None:
    """Bytes that are no deflate stream are an error of the recording, as a cut-off one is."""
    write(tmp_path, VERSION, [frame(number, "pub") for number in range(100)], [])
    archive = tmp_path / "frames.jsonl.gz"
    data = bytearray(archive.read_bytes())
    data[40:44] = b"\xff\xff\xff\xff"
    archive.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=r"frames\.jsonl\.gz: not a recording: at line"):
        load_capture(tmp_path)


def test_a_message_has_a_sequence_and_a_payload() -> None:
    """Anything but three parts with a sequence of eight bytes is no published message."""
    assert Frame(0, 0, "pub", (b"", (7).to_bytes(8, "big"), b"p")).message == (7, b"p")
    assert Frame(0, 0, "pub", (b"", b"\0", b"p")).message is None
    assert Frame(0, 0, "pub", (b"", b"p")).message is None
