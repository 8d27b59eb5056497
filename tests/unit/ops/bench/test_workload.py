"""The benchmark's truth: what its events lead to is what its answers are compared with."""

import numpy as np
import pytest

from index.fold import Flush, fold
from index.lookup import Prompt, ask, reaches
from index.match import NOTHING
from index.memory_store import MemoryStore
from ops.bench.traffic import UNIT, block_hashes, chain, holder, messages
from ops.bench.workload import GPU, HOST, LENGTHS, Workload, build, queries
from schemas.events import decode_record


@pytest.fixture(scope="module")
def workload() -> Workload:
    """A small tree on few replicas."""
    return build(6_000, 8, 16)


async def test_records_lead_to_the_answers_that_are_expected(workload: Workload) -> None:
    """Each replica's reach by tier, of prompts of every length, follows from the relays' records."""
    store = MemoryStore()
    await store.setup(workload.model)
    records = [decode_record(message.value) for message in messages(workload, 4)]
    await store.apply(Flush(workload.model, None, fold(records)))
    questions = [ask(row.holder, row.profile) for row in await store.holders(workload.model) if row.profile is not None]
    hashes = block_hashes(workload)
    for query in (query for length in LENGTHS for query in queries(workload, length, 20, seed=1)):
        tokens = len(query.blocks) * UNIT + 1
        prompt = Prompt(workload.model, tokens, hashes=chain(hashes, query.blocks).tobytes(), block_size=UNIT)
        found = await reaches(store, prompt, questions)
        for replica in range(workload.replicas):
            gpu, blocks = int(query.gpu[replica]), int(query.reach[replica])
            tiers = {"gpu": gpu * UNIT, "host": (blocks - gpu) * UNIT}
            reach = found.get(holder(replica), NOTHING)
            assert reach.by_tier == {tier: count for tier, count in tiers.items() if count}


def test_steps_lead_to_the_residency(workload: Workload) -> None:
    """Applied in their order, engine events give each block the tiers that it ends with, holes and all."""
    has = np.zeros_like(workload.residency)
    for step in workload.steps:
        before = has[step.blocks, step.replica]
        assert not step.stored or step.parent < 0 or has[step.parent, step.replica]
        after = before | step.tier if step.stored else before & ~np.uint8(step.tier)
        assert step.moved == np.count_nonzero((before == 0) != (after == 0))
        has[step.blocks, step.replica] = after
    assert np.array_equal(has, workload.residency)
    assert {GPU, HOST, GPU | HOST} <= set(np.unique(has).tolist())


def test_the_same_seed_gives_the_same_workload(workload: Workload) -> None:
    """So that runs can be compared."""
    again = build(6_000, 8, 16)
    assert np.array_equal(again.residency, workload.residency)
    assert [query.blocks.tolist() for query in queries(again, 64, 5, 1)] == [
        query.blocks.tolist() for query in queries(workload, 64, 5, 1)
    ]
