"""Recordings made from outside the engine: each rank's requests, and which of them can be compared."""

from typing import Any

from ops.replay.capture import Capture, Frame
from ops.replay.ranks import parts_of
from ops.replay.vllm import steps_of


def capture(*log: dict[str, Any], sources: tuple[str, ...] = ()) -> Capture:
    frames = tuple(Frame(number, -1, source, ()) for number, source in enumerate(sources))
    return Capture("c", "vllm", "0.32.0", {"publisher": {"dp_rank": 3}}, frames, log)


def submit(rid: str, after_frame: int = 0, **fields: Any) -> dict[str, Any]:
    return {"ev": "submit", "rid": rid, "prompt_token_ids": [1, 2, 3], "after_frame": after_frame, **fields}


def finish(rid: str, cached: int = 0, after_frame: int = 0, **fields: Any) -> dict[str, Any]:
    return {"ev": "finish", "rid": rid, "num_cached_tokens": cached, "after_frame": after_frame, **fields}


def test_each_rank_has_a_recording_of_its_own() -> None:
    """Frames and requests go to the rank that they name; a request's frames lie in its step, before the next one's."""
    parts = parts_of(
        capture(
            submit("a", 0, dp_rank=0),
            finish("a", 0, 1, dp_rank=0),
            submit("b", 1, dp_rank=1),
            finish("b", 32, 2, dp_rank=1),
            submit("c", 2, dp_rank=0),
            finish("c", 64, 3, dp_rank=0),
            sources=("pub0", "pub1", "pub0", "replay0"),
        )
    )
    assert [(part.name, part.rank) for part in parts] == [("c-rank0", 0), ("c-rank1", 1)]
    steps = [steps_of(part) for part in parts]
    assert [[(r.rid, r.delivered_tokens) for r in step.requests] for step in steps[0]] == [[("a", 0)], [("c", 64)]]
    assert [[frame.number for frame in step.frames] for step in steps[0]] == [[0], [2]]
    assert [(s.requests[0].rid, [f.number for f in s.frames]) for s in steps[1]] == [("b", [1])]


def test_a_request_of_no_known_rank_is_left_out_once() -> None:
    """What a load balancer placed is counted with the first rank, and what ran beside it is left out on its own."""
    parts = parts_of(
        capture(
            submit("free", dp_rank=None),
            submit("pinned", dp_rank=1),
            finish("free", dp_rank=None),
            finish("pinned", dp_rank=1),
            submit("alone", dp_rank=1),
            finish("alone", dp_rank=1),
            sources=("pub0", "pub1"),
        )
    )
    causes = [{r.rid: r.unknowable for step in steps_of(part) for r in step.requests} for part in parts]
    assert causes == [{"free": "rank_not_in_log"}, {"pinned": "overlapped", "alone": None}]


def test_one_rank_without_steps_is_read_request_by_request() -> None:
    """A log that has no decisions gets one from each request's end; an abort has none."""
    (part,) = parts_of(
        capture(submit("a"), finish("a", 32), submit("b"), {"ev": "abort", "rid": "b"}, sources=("pub",))
    )
    assert [(r.rid, r.delivered_tokens, r.unknowable) for step in steps_of(part) for r in step.requests] == [
        ("a", 32, None)
    ]
    assert part.rank == 3


def test_a_recording_from_inside_the_engine_stays_as_it_is() -> None:
    """Where the log says what each step decided, that counts."""
    whole = capture(submit("a"), {"ev": "scheduled", "rid": "a", "step": 1, "num_cached_tokens": 0}, finish("a"))
    assert parts_of(whole) == (whole,)
