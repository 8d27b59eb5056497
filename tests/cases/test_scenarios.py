"""The scenario cases of groups A and B, each in a harness of its own."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from index.digests import index_digest
from index.hashing import pack_tokens
from index.lookup import Prompt, ask, reaches
from relays.dialects import EngineSettings, vllm_profile
from relays.engine import EngineRank
from schemas.events import decode_record, encode_record
from schemas.profiles import Holder
from tests.cases.given import given_cases
from tests.cases.notation import Case, flat_tokens
from tests.support.coroutines import immediate
from tests.support.replayed import memory_store, tell

SCENARIOS = [pytest.param(case, id=case.id) for case in given_cases("scenario") if case.id[0] in "AB"]

_ROOT = 1  # engine hash of the block that stays
_SPARE_BYTES = 20 << 20
_PAGES = Path("/proc/self/statm")
_PAGE_BYTES = 4096


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", SCENARIOS)
def test_a_scenario_holds(case: Case) -> None:
    """What the case expects in words is true of what runs here."""
    harness = HARNESSES.get(case.id)
    if harness is None:
        pytest.skip(f"{case.id} has no harness yet: {case.title}")
    harness(case)


def keep_nothing_of_churn(case: Case) -> None:
    """B14: after any number of blocks that came and went below a shared one, only that one is known anywhere."""
    churn, split = (next(step for step in case.steps if step.get("gen") == name) for name in ("churn", "split"))
    engine = _Engine(churn["root"]["from"], flat_tokens(churn["root"]["tok"]))
    cycles = churn["cycles"]
    used_bytes = 0
    for number, events in enumerate(_churn(cycles)):
        engine.send(*events)
        if number == cycles // 10:
            used_bytes = _resident_bytes()
    engine.check_only_root()
    assert _resident_bytes() <= max(used_bytes * 1.1, used_bytes + _SPARE_BYTES)
    for _ in range(split["repeat"]):
        for events in _split():
            engine.send(*events)
    engine.check_only_root()
    for step in case.steps:
        if step.get("ask") == "match":
            reach = engine.ask(flat_tokens(step["tok"]))
            assert {str(engine.rank.holder): {"gpu": reach}} == step["want"]


HARNESSES: dict[str, Callable[[Case], None]] = {"B14": keep_nothing_of_churn}


class _Engine:
    """A vLLM engine whose messages go through decoder, mirror, records and fold into the memory store."""

    def __init__(self, name: str, root_tokens: list[int]) -> None:
        self.rank = EngineRank(vllm_profile("m", name, "0.32.0", EngineSettings()), Holder(name, 0), life=1)
        self.store = memory_store()
        self._sequence = 0
        self.send(_store([_ROOT], None, root_tokens))

    def send(self, *events: dict[str, Any]) -> None:
        self.rank.take(self._sequence, msgspec.msgpack.encode([0.0, events, 0]))
        self._sequence += 1
        tell(self.store, [decode_record(encode_record(record)) for record in self.rank.speak()])

    def ask(self, tokens: list[int]) -> int:
        question = ask(self.rank.holder, self.rank.mirror.profile)
        prompt = Prompt("m", len(tokens), pack_tokens(tokens))
        return immediate(reaches(self.store, prompt, [question], whole_prompt=True))[self.rank.holder].tokens

    def check_only_root(self) -> None:
        mirror = self.rank.mirror
        resident = list(mirror.resident())
        assert len(resident) == 1
        assert (mirror.nodes, mirror.blocks, mirror.pending_blocks) == (1, 1, 0)
        assert immediate(self.store.digest("m", self.rank.holder)) == index_digest(resident)


def _churn(cycles: int) -> Iterator[list[dict[str, Any]]]:
    """Yield messages: each takes the cycle before back, last block first or first block first, and stores three new."""
    before: list[int] = []
    for cycle in range(cycles):
        first = 10 + 3 * cycle
        hashes = [first, first + 1, first + 2]
        yield [_remove(before), _store(hashes, _ROOT, list(range(first * 4, first * 4 + 12)))]
        before = hashes if cycle % 2 else hashes[::-1]
    yield [_remove(before)]


def _split() -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of one cycle: a chain s-x1-x2-x3 and a branch s-x1-y2, taken back from the middle."""
    yield [_store([2, 3, 4], _ROOT, list(range(100, 112)))]
    yield [_store([5], 2, list(range(200, 204)))]
    for name in (2, 5, 4, 3):
        yield [_remove([name])]


def _store(hashes: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
    }


def _remove(hashes: list[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


def _resident_bytes() -> int:
    """Return what the process has in memory; 0 where the kernel does not tell."""
    gc.collect()
    return int(_PAGES.read_text().split()[1]) * _PAGE_BYTES if _PAGES.exists() else 0
