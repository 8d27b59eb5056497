"""Writes what a check received and asked in the format of the recordings, so that it can be replayed later."""

import base64
import gzip
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from relays.dialects import EngineSettings
from schemas.errors import ConfigError


class Recorder:
    """Gathers frames and log entries in memory; `write` makes meta.json, frames.jsonl.gz and log.jsonl.gz of them."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self._began_s = time.monotonic()

    def frame(self, source: str, parts: Sequence[bytes], step: int) -> None:
        """Keep one received message; `source`: `pub` or `replay`, `step`: the probe before it."""
        self.frames.append(
            {
                "i": len(self.frames),
                "src": source,
                "step": step,
                "t": self._now_s(),
                "frames": [base64.b64encode(part).decode() for part in parts],
            }
        )

    def probe(self, engine: str, name: str, step: int, tokens: Sequence[int], salt: str | None, cached: int) -> None:
        """Keep one probe and what the engine reused of it, as the engine's other recordings say it."""
        entries: list[dict[str, Any]]
        if engine == "vllm":
            submit = {"ev": "submit", "rid": name, "prompt_token_ids": list(tokens)}
            if salt is not None:
                submit["cache_salt"] = salt
            entries = [submit, {"ev": "scheduled", "rid": name, "step": step, "num_cached_tokens": cached}]
        else:
            # its log compares with the match of the whole list; the engine computes the last token itself
            request = {"op": "request", "name": name, "tokens": list(tokens)[:-1], "salt": salt, "extra_key": None}
            entries = [request | {"match": {"device": cached, "host": 0}}]
        for entry in entries:
            self.log.append(entry | {"t": self._now_s(), "after_frame": len(self.frames)})

    def write(self, folder: Path, engine: str, version: str, settings: EngineSettings, rank: int, unit: int) -> None:
        """Write the recording.

        Raises:
            ConfigError: the folder cannot be written.
        """
        meta = {
            "scenario": "check-engine",
            "note": "recorded by kvatlas check-engine: probe prompts, one at a time",
            f"{engine}_version": version,
            "publisher_rank": rank,
            "n_frames": len(self.frames),
        }
        if engine == "vllm":
            meta |= {
                "block_size": settings.block_size or unit,
                "hash_algo": settings.hash_algorithm,
                "env": {"PYTHONHASHSEED": settings.hash_seed} if settings.hash_seed is not None else {},
            }
        else:
            meta |= {"page_size": settings.block_size or unit, "is_eagle": settings.drafting == "eagle"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "meta.json").write_bytes(orjson.dumps(meta, option=orjson.OPT_INDENT_2))
            for name, lines in (("frames", self.frames), ("log", self.log)):
                with gzip.open(folder / f"{name}.jsonl.gz", "wb") as stream:
                    stream.writelines(orjson.dumps(line) + b"\n" for line in lines)
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error}") from error

    def _now_s(self) -> float:
        return round(time.monotonic() - self._began_s, 6)
