"""`kvatlas replay`: what is printed and returned where a recording cannot be used."""

import json
import shutil
from pathlib import Path

import pytest

from ops.replay.command import replay_all
from ops.settings import Settings
from schemas.errors import ConfigError
from tests.support.captures import short_recordings


async def test_a_recording_that_cannot_be_used_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each unusable one is named with file and place, the others are compared, and the whole has failed."""
    good = short_recordings()[0]
    cut, odd = tmp_path / "cut", tmp_path / "odd"
    shutil.copytree(good, cut)
    frames = cut / "frames.jsonl.gz"
    frames.write_bytes(frames.read_bytes()[:-20])
    shutil.copytree(good, odd)
    (odd / "meta.json").write_text("{}")
    folders = [cut, tmp_path / "nowhere", odd, good, good / "meta.json"]
    assert await replay_all(folders, stack=False, as_json=True, settings=Settings()) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["capture"] for line in lines] == ["cut", "nowhere", "odd", good.name]
    assert [str(frames) in lines[0]["error"], "at line" in lines[0]["error"]] == [True, True]
    assert "meta.json" in lines[1]["error"]
    assert "neither vllm_version nor sglang_version" in lines[2]["error"]
    assert lines[3]["exact"] == lines[3]["compared"] > 0


async def test_all_usable_and_equal_is_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    """The table ends with the sum, and the code is 0."""
    assert await replay_all(short_recordings(), stack=False, as_json=False, settings=Settings()) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("total")


async def test_no_folder_at_all_is_a_mistake(tmp_path: Path) -> None:
    """Files beside recordings are passed over; nothing but files is no question."""
    (tmp_path / "README.md").touch()
    with pytest.raises(ConfigError, match="no recording"):
        await replay_all([tmp_path / "README.md"], stack=False, as_json=True, settings=Settings())
