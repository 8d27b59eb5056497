"""The simulated engine's scheduler."""

import pytest

from ops.simulator.block_pool import BlockPool
from ops.simulator.chain import HashScheme, root_of
from ops.simulator.dialect import dialect_of
from ops.simulator.engine import Engine, Finished, Limits, Request
from schemas.errors import BadRequest
from schemas.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Event

SIZE = 4


def engine_of(
    blocks: int = 20, *, max_num_seqs: int = 8, max_num_batched_tokens: int = 100, version: str = "0.32.0"
) -> Engine:
    dialect = dialect_of(version)
    return Engine(
        BlockPool(blocks, SIZE, unhashed_first=dialect.unhashed_first),
        HashScheme(root_of("0"), SIZE, dialect.tagged_keys),
        dialect,
        Limits(max_num_seqs, max_num_batched_tokens, max_model_len=1000),
    )


def request(name: str, prompt: range, generated: int = 1, *, salt: str | None = None) -> Request:
    return Request(name, list(prompt), [900 + n for n in range(generated)], salt=salt)


def drain(engine: Engine) -> tuple[list[Finished], list[Event]]:
    finished: list[Finished] = []
    events: list[Event] = []
    while engine.running or engine.waiting:
        outcome = engine.step()
        finished += outcome.finished
        events += outcome.events
    return finished, events


def cached(engine: Engine, asked: Request) -> int:
    engine.submit(asked)
    return drain(engine)[0][0].cached_tokens


def test_a_prompts_full_blocks_are_one_event_of_its_first_step() -> None:
    engine = engine_of()
    engine.submit(request("a", range(10), 3))
    (event,) = engine.step().events
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(range(8))
    assert event.extra_keys == [None, None]
    assert not engine.step().events


def test_generated_tokens_fill_blocks_too() -> None:
    engine = engine_of()
    assert cached(engine, request("a", range(6), 4)) == 0
    again = Request("b", [*range(6), 900, 901, 902], [1])
    assert cached(engine, again) == 8


def test_the_last_generated_token_is_not_computed() -> None:
    engine = engine_of()
    assert cached(engine, request("a", range(6), 2)) == 0
    assert cached(engine, Request("b", [*range(6), 900, 901, 902], [1])) == 4


def test_two_requests_of_one_step_share_what_the_first_just_stored() -> None:
    engine = engine_of()
    engine.submit(request("a", range(9), 2))
    engine.submit(request("b", range(9), 2))
    finished, _ = drain(engine)
    assert [done.cached_tokens for done in finished] == [0, 8]


def test_a_salt_shares_with_its_own_only() -> None:
    engine = engine_of()
    asked = [request(str(n), range(9), salt=salt) for n, salt in enumerate([None, "s", "s", "t"])]
    assert [cached(engine, one) for one in asked] == [0, 0, 8, 0]


def test_an_eviction_stands_before_the_store_that_caused_it() -> None:
    engine = engine_of(blocks=5)
    engine.submit(request("a", range(12)))
    drain(engine)
    engine.submit(request("b", range(100, 109)))
    _, events = drain(engine)
    assert [type(event) for event in events] == [BlockRemoved, BlockRemoved, BlockStored]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = engine_of(max_num_batched_tokens=6)
    engine.submit(request("a", range(14)))
    plans = []
    while engine.waiting or engine.running:
        plan = engine.schedule()
        plans.append(plan.prefill_tokens)
        engine.complete(plan)
    assert plans == [6, 6, 2]


def test_no_more_requests_run_at_once_than_allowed() -> None:
    engine = engine_of(max_num_seqs=2)
    for name in "abc":
        engine.submit(request(name, range(5), 3))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)


def test_a_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    engine = engine_of(blocks=6)
    engine.submit(request("a", range(8), 4))
    engine.submit(request("b", range(50, 66)))
    engine.submit(request("c", range(90, 93)))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 2)
    assert [done.request.id for done in drain(engine)[0]] == ["a", "b", "c"]


def test_out_of_blocks_the_youngest_starts_again_and_keeps_its_first_count() -> None:
    engine = engine_of(blocks=6)
    engine.submit(request("a", range(8), 8))
    engine.submit(request("b", range(50, 58), 8))
    running = []
    finished: list[Finished] = []
    while engine.running or engine.waiting:
        finished += engine.step().finished
        running.append(engine.running)
    assert running[0] == 2
    assert 1 in running[:8]
    assert [(done.request.id, done.cached_tokens) for done in finished] == [("a", 0), ("b", 0)]
    assert engine.pool.free_blocks == 5


def test_a_reset_is_told_with_the_next_step_that_runs() -> None:
    engine = engine_of()
    cached(engine, request("a", range(9)))
    assert engine.reset_prefix_cache()
    engine.submit(request("b", range(9)))
    finished, events = drain(engine)
    assert finished[0].cached_tokens == 0
    assert [type(event) for event in events] == [AllBlocksCleared, BlockStored]


def test_a_reset_is_refused_while_a_request_runs() -> None:
    engine = engine_of()
    engine.submit(request("a", range(9), 3))
    engine.step()
    assert not engine.reset_prefix_cache()


def test_an_aborted_request_leaves_its_blocks_findable() -> None:
    engine = engine_of()
    engine.submit(request("a", range(9), 50))
    engine.submit(request("b", range(9), 50))
    plan = engine.schedule()
    engine.abort("a")
    engine.abort("b")
    engine.abort("nobody")
    assert not engine.complete(plan).finished
    assert (engine.running, engine.waiting) == (0, 0)
    assert engine.pool.free_blocks == 19
    assert cached(engine, request("c", range(9))) == 8


@pytest.mark.parametrize(
    ("prompt", "generated", "message"),
    [(range(0), 1, "no tokens"), (range(3), 0, "at least 1"), (range(70), 7, "are more than 76")],
)
def test_what_cannot_run_is_refused(prompt: range, generated: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        engine_of().submit(request("a", prompt, generated))
