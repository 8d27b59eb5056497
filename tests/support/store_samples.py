"""The recorded and constructed messages of stores (`tests/data/llmd`, `tests/data/mooncake`)."""

import json
from base64 import b64decode

from tests.support.captures import ROOT


def store_samples(store: str) -> list[list[bytes]]:
    """Return the frames of each message: topic, sequence, payload."""
    lines = (ROOT / "tests" / "data" / store / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [[b64decode(frame) for frame in row["frames"]] for row in rows if "frames" in row]
