"""SGLang messages in both encodings, recorded ones, and a table of payloads with what they must decode to."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relays.engine_events import Cleared, EngineEvent, Removed
from relays.sglang import Source
from tests.support.payloads import TOP, array_stored, batch, expected, map_removed, pack

RECORDED = Path(__file__).parents[1] / "data" / "sglang"
WIDE = 2601118150718164662  # an image's sentinel token in 0.5.23 (engines/other-engines.md 1.6)
TOKENS = (1, 2, 3, 4)
PAIRS = ((1, 2), (2, 3), (3, 4), (4, 5))


def map_stored(**fields: object) -> dict[str, object]:
    """Return a store as 0.5.23 sends it for a plain prompt, with fields changed or added."""
    plain: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [11],
        "parent_block_hash": None,
        "token_ids": list(TOKENS),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
    }
    return {**plain, **fields}


@dataclass(frozen=True)
class Case:
    """A payload and what it says."""

    name: str
    value: object
    events: Sequence[EngineEvent]
    source: Source = field(default_factory=Source)

    @property
    def payload(self) -> bytes:
        """Return the payload's bytes."""
        return pack(self.value)


@dataclass(frozen=True)
class Message:
    """One recorded message of a PUB socket."""

    name: str
    version: str
    capture: str
    frames: tuple[bytes, ...]

    @property
    def sequence(self) -> int:
        """Return its number."""
        return int.from_bytes(self.frames[1], "big")

    @property
    def payload(self) -> bytes:
        """Return the batch's bytes."""
        return self.frames[2]


def recorded_messages() -> list[Message]:
    """Return the messages of tests/data/sglang."""
    return [Message(row["name"], row["version"], row["capture"], _frames(row)) for row in _rows("messages.jsonl")]


def recorded_replays(version: str) -> list[tuple[bytes, ...]]:
    """Return the replay socket's recorded replies of a version, the end mark last."""
    return [_frames(row) for row in _rows("replays.jsonl") if row["version"] == version]


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / name).read_text().splitlines()]


def _frames(row: dict[str, Any]) -> tuple[bytes, ...]:
    return tuple(base64.b64decode(part) for part in row["frames"])


UNCERTAIN = Source(gpu_tier="host")
_PAIRED = expected(tokens=[1, 2, 3, 4, 5], pairs=True)

CASES = [
    Case("0.5.6 array without medium", batch(array_stored([11], None, TOKENS, 4, None)), [expected()]),
    Case("0.5.6 array, the default cut too", batch(array_stored()), [expected()]),
    Case("0.5.9 array with medium", batch(array_stored([11], 10, TOKENS, 4, None, "GPU")), [expected(parent=10)]),
    Case("0.5.17 array with nothing cut", batch(array_stored([11], None, TOKENS, 4, None, None)), [expected()]),
    Case(
        "0.5.18 array with a salt at the end",
        batch(array_stored([11], None, TOKENS, 4, None, "GPU", {"cache_salt": "a"})),
        [expected(salt="a")],
    ),
    Case(
        "0.5.18 array without a salt there",
        batch(array_stored([11], None, TOKENS, 4, None, "CPU_PINNED", None)),
        [expected(tier="host")],
    ),
    Case(
        "0.5.6 array removals and clear",
        batch(["BlockRemoved", [11]], ["BlockRemoved", [11, 12], None], ["AllBlocksCleared"]),
        [Removed(hashes=(11,)), Removed(hashes=(11, 12)), Cleared()],
    ),
    Case("0.5.9 array removal in the host tier", batch(["BlockRemoved", [11], "CPU_PINNED"]), [
        Removed(hashes=(11,), tier="host")]),
    Case("0.5.20 map", batch(map_stored()), [expected()]),
    Case("0.5.20 map without what is unset", batch({
        key: value for key, value in map_stored().items() if key not in ("medium", "lora_id")}), [expected()]),
    Case(
        "0.5.23 map with every field",
        batch(map_stored(parent_block_hash=10, cache_salt="a", session_id="s", lora_name="sql")),
        [expected(parent=10, salt="a", adapter="sql")],
    ),
    Case(
        "map removal and clear",
        batch(map_removed(medium="CPU_PINNED"), map_removed(), {"type": "AllBlocksCleared"}),
        [Removed(hashes=(11,), tier="host"), Removed(hashes=(11,)), Cleared()],
    ),
    Case(
        "a whole chain in one event",
        batch(map_stored(block_hashes=[11, 12, 13], token_ids=list(range(12)))),
        [expected(hashes=(11, 12, 13), tokens=list(range(12)))],
    ),
    Case("pages of one token", batch(array_stored([11, 12], 10, [7, 8], 1, None, "GPU")), [
        expected(hashes=(11, 12), parent=10, tokens=[7, 8], block_size=1)]),
    Case("array pairs", batch(array_stored([11], None, PAIRS, 4, None, "GPU")), [_PAIRED]),
    Case("map pairs", batch(map_stored(token_ids=PAIRS)), [_PAIRED]),
    Case("one pair", batch(map_stored(token_ids=PAIRS[:1], block_size=1)), [
        expected(tokens=[1, 2], block_size=1, pairs=True)]),
    Case("both encodings in one batch", batch(array_stored(), map_removed()), [expected(), Removed(hashes=(11,))]),
    Case("no events", batch(), []),
    Case("signed hashes", batch(array_stored([-5], -6), map_removed(block_hashes=[-5])), [
        expected(hashes=(TOP,), parent=TOP - 1), Removed(hashes=(TOP,))]),
    Case("unsigned hashes", batch(map_stored(block_hashes=[TOP], parent_block_hash=TOP - 1)), [
        expected(hashes=(TOP,), parent=TOP - 1)]),
    Case("parent 0 is a hash, not a root", batch(map_stored(parent_block_hash=0)), [expected(parent=0)]),
    Case("wide image tokens", batch(map_stored(token_ids=[1, WIDE, WIDE, (1 << 63) - 1])), [
        expected(tokens=[1, WIDE, WIDE, (1 << 63) - 1])]),
    Case("wide tokens in pairs", batch(map_stored(token_ids=[(1, WIDE), (WIDE, 2)], block_size=2)), [
        expected(tokens=[1, WIDE, 2], block_size=2, pairs=True)]),
    Case("a store of no pages", batch(map_stored(block_hashes=[], token_ids=[])), [expected(hashes=(), tokens=[])]),
    Case(
        "a device tier that may have been demoted in silence",
        batch(map_stored(), map_removed(), map_removed(medium=None), map_stored(medium="CPU_PINNED")),
        [expected(tier="host"), *[Removed(hashes=(11,), tier="host")] * 2, expected(tier="host")],
        UNCERTAIN,
    ),
]  # fmt: skip
