"""The simulated SGLang scheduler."""

from typing import Any

import pytest

from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.engine import Engine
from ops.simulator.sglang.pages import PLAIN, Namespace
from ops.simulator.sglang.requests import Finished, Limits, Request
from schemas.errors import BadRequest
from schemas.sglang import AllBlocksCleared, BlockStored, Event

SIZE = 4


def engine_of(
    pages: int = 40,
    *,
    running: int = 8,
    chunk: int = 1000,
    version: str = "0.5.23",
    pairs: bool = False,
    **options: Any,
) -> Engine:
    cache = Cache(dialect_of(version), SIZE, pages, **options)
    cache.take_events()
    return Engine(cache, Limits(running, chunk, 10_000), pairs=pairs)


def request(name: str, prompt: range, generated: int = 1, namespace: Namespace = PLAIN) -> Request:
    return Request(name, list(prompt), [900 + n for n in range(generated)], namespace)


def drain(engine: Engine) -> tuple[list[Finished], list[Event]]:
    finished: list[Finished] = []
    events: list[Event] = []
    while engine.busy:
        outcome = engine.step()
        finished += outcome.finished
        events += outcome.events
    return finished, events


def cached(engine: Engine, asked: Request) -> tuple[int, int]:
    """Return how many tokens a request found, and how many of them on the host."""
    engine.submit(asked)
    (done,) = drain(engine)[0]
    return done.cached_tokens, done.host_tokens


def test_the_first_step_tells_that_the_cache_is_empty() -> None:
    """The cache clears itself when it is built; a step without requests publishes that."""
    engine = Engine(Cache(dialect_of("0.5.23"), SIZE, 10), Limits(1, 100, 100))
    assert engine.busy
    assert [type(event) for event in engine.step().events] == [AllBlocksCleared]
    assert not engine.busy


def test_a_prompt_is_in_the_tree_when_it_is_computed() -> None:
    """Its whole pages are told with the step that computed them, what is generated behind them at the end."""
    engine = engine_of()
    engine.submit(request("a", range(10), 4))
    (event,) = engine.step().events
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(range(8))
    (rest,) = drain(engine)[1]
    assert isinstance(rest, BlockStored)
    assert rest.token_ids == [8, 9, 900, 901]


def test_the_last_generated_token_is_not_computed() -> None:
    """Of six tokens and two generated, seven are in the cache: one page."""
    engine = engine_of()
    cached(engine, request("a", range(6), 2))
    assert cached(engine, Request("b", [*range(6), 900, 901, 902], [1])) == (4, 0)


def test_a_hit_leaves_the_last_token_out() -> None:
    """The prompt's last token is computed in any case, so a prompt of whole pages misses its last one."""
    engine = engine_of()
    cached(engine, request("a", range(8)))
    assert cached(engine, request("b", range(8))) == (4, 0)
    assert cached(engine, request("c", range(9))) == (8, 0)


def test_pairs_take_a_token_more() -> None:
    """With EAGLE the pairs of all tokens but the last are looked for: of nine tokens seven, of ten eight."""
    engine = engine_of(pairs=True)
    cached(engine, request("a", range(12)))
    assert cached(engine, request("b", range(9))) == (4, 0)
    assert cached(engine, request("c", range(10))) == (8, 0)


def test_two_prompts_of_one_step_share_nothing() -> None:
    """What a step computes is found from the next step on; the second one's pages are duplicates."""
    engine = engine_of()
    engine.submit(request("a", range(9), 2))
    engine.submit(request("b", range(9), 2))
    finished, events = drain(engine)
    assert [done.cached_tokens for done in finished] == [0, 0]
    assert len(events) == 1
    assert engine.cache.free == 40 - 2


def test_prompts_come_before_tokens() -> None:
    """A step computes prompts or generates tokens, never both."""
    engine = engine_of()
    engine.submit(request("a", range(9), 3))
    engine.step()
    engine.submit(request("b", range(50, 59), 2))
    plan = engine.schedule()
    assert (plan.prefill_tokens, plan.decodes) == (9, 0)
    engine.complete(plan)
    assert engine.schedule().decodes == 2


def test_a_long_prompt_is_computed_in_chunks_of_whole_pages() -> None:
    """Each chunk is in the tree before the next; the count of cached tokens is the first chunk's."""
    engine = engine_of(chunk=10)
    engine.submit(request("a", range(22)))
    counts, stored = [], []
    finished: list[Finished] = []
    while engine.busy:
        plan = engine.schedule()
        counts.append(plan.prefill_tokens)
        outcome = engine.complete(plan)
        finished += outcome.finished
        stored.append(sum(len(e.block_hashes) for e in outcome.events if isinstance(e, BlockStored)))
    assert counts == [8, 8, 6]
    assert stored == [2, 2, 1]
    assert finished[0].cached_tokens == 0


def test_a_chunks_last_piece_and_the_next_prompt_share_a_step() -> None:
    """What is left of a step's budget goes to the next in line, which may be a chunk again."""
    engine = engine_of(chunk=12)
    engine.submit(request("a", range(16)))
    engine.submit(request("b", range(50, 70)))
    engine.submit(request("c", range(90, 94)))
    assert [engine.step() and engine.running for _ in range(2)] == [1, 1]
    finished, _ = drain(engine)
    assert [done.request.id for done in finished] == ["b", "c"]


def test_no_more_requests_run_at_once_than_allowed() -> None:
    """The others wait in their order."""
    engine = engine_of(running=2)
    for name in "abc":
        engine.submit(request(name, range(5), 3))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)


def test_a_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    """All that admitted requests may still take is kept for them."""
    engine = engine_of(pages=9)
    engine.submit(request("a", range(8), 8))
    engine.submit(request("b", range(50, 66)))
    engine.submit(request("c", range(90, 93)))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 2)
    assert [done.request.id for done in drain(engine)[0]] == ["a", "b", "c"]


def test_a_running_requests_prefix_is_not_evicted() -> None:
    """Others make room around it, and the request finds its own pages to the end."""
    engine = engine_of(pages=12)
    engine.submit(request("a", range(9), 6))
    engine.step()
    engine.submit(request("b", range(50, 66), 2))
    drain(engine)
    assert cached(engine, request("c", range(9))) == (8, 0)


def test_a_salt_shares_with_its_own_only() -> None:
    """Namespaces are apart in the tree."""
    engine = engine_of()
    salts = [None, "s", "s", "t"]
    asked = [request(str(n), range(9), namespace=Namespace(salt=salt)) for n, salt in enumerate(salts)]
    assert [cached(engine, one)[0] for one in asked] == [0, 0, 8, 0]


def test_cached_tokens_are_split_by_tier() -> None:
    """What was loaded back from the host is counted, and named, beside what the device had."""
    engine = engine_of(pages=12, host_pages=40)
    cached(engine, request("a", range(33)))
    cached(engine, request("b", range(100, 133)))
    assert cached(engine, request("c", range(33))) == (32, 32)
    assert cached(engine, request("d", range(34))) == (32, 0)


def test_host_copies_are_told_in_a_step_of_their_own() -> None:
    """An engine that has nothing to do takes note of the copies that ended, and tells them."""
    engine = engine_of(host_pages=40)
    engine.submit(request("a", range(9)))
    assert [getattr(event, "medium", None) for event in engine.step().events] == ["GPU"]
    assert engine.busy
    assert [getattr(event, "medium", None) for event in engine.step().events] == ["CPU_PINNED"]
    assert not engine.busy


def test_a_flush_is_told_without_a_request() -> None:
    """SGLang's idle loop publishes, so the next step does."""
    engine = engine_of()
    cached(engine, request("a", range(9)))
    assert engine.reset_prefix_cache()
    assert engine.busy
    assert [type(event) for event in engine.step().events] == [AllBlocksCleared]
    assert cached(engine, request("b", range(9))) == (0, 0)


def test_a_flush_is_refused_while_a_request_is_there() -> None:
    """Waiting or running."""
    engine = engine_of()
    engine.submit(request("a", range(9), 3))
    assert not engine.reset_prefix_cache()
    engine.step()
    assert not engine.reset_prefix_cache()


def test_an_aborted_request_leaves_what_it_computed() -> None:
    """Aborted between the halves of a step, while it waits, or unknown: pages and locks are given back."""
    engine = engine_of()
    for name in ("a", "b"):
        engine.submit(request(name, range(9), 20))
    engine.step()
    plan = engine.schedule()
    for name in ("a", "b", "nobody"):
        engine.abort(name)
    assert not engine.complete(plan).finished
    engine.submit(request("c", range(9)))
    engine.abort("c")
    assert (engine.running, engine.waiting) == (0, 0)
    assert engine.cache.available == 40
    assert cached(engine, request("d", range(9))) == (8, 0)


@pytest.mark.parametrize(
    ("prompt", "generated", "message"),
    [(range(0), 1, "no tokens"), (range(3), 0, "at least 1"), (range(150), 6, "are more than 155")],
)
def test_what_cannot_run_is_refused(prompt: range, generated: int, message: str) -> None:
    """Nothing is queued that could never finish."""
    with pytest.raises(BadRequest, match=message):
        engine_of().submit(request("a", prompt, generated))


def test_the_longest_request_runs() -> None:
    """As long as the pages hold, though they are full of others' prompts."""
    engine = engine_of(host_pages=10, write_policy="write_back")
    cached(engine, request("a", range(100, 240)))
    assert cached(engine, request("b", range(145), 10)) == (0, 0)
