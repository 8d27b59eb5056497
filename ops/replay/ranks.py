"""vLLM recordings made from outside the engine: several ranks, and requests without the steps that scheduled them."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from ops.replay.capture import Capture, Frame

Entry = dict[str, Any]


def parts_of(capture: Capture) -> tuple[Capture, ...]:
    """Return each rank's own recording, with a step for each request where the log has no steps."""
    if capture.engine != "vllm":
        return (capture,)
    ranks = sorted({int(frame.source[3:]) for frame in capture.published if frame.source[3:].isdigit()})
    if ranks:
        return tuple(_of_rank(capture, rank, counts_unranked=rank == ranks[0]) for rank in ranks)
    kinds = {entry.get("ev") for entry in capture.log}
    if "finish" in kinds and "scheduled" not in kinds:
        return (_with_steps(capture, capture.published, capture.log, counts_unranked=True),)
    return (capture,)


def _of_rank(capture: Capture, rank: int, *, counts_unranked: bool) -> Capture:
    frames = [msgspec.structs.replace(f, source="pub") for f in capture.published if f.source == f"pub{rank}"]
    log = [entry for entry in capture.log if entry.get("dp_rank", rank) in (rank, None)]
    named = msgspec.structs.replace(
        capture, name=f"{capture.name}-rank{rank}", meta={**capture.meta, "publisher_rank": rank}
    )
    return _with_steps(named, frames, log, counts_unranked=counts_unranked)


def _with_steps(capture: Capture, frames: Sequence[Frame], log: Sequence[Entry], *, counts_unranked: bool) -> Capture:
    """Return the recording with a step from each submission to the next, and a decision in it where one is known.

    A request that others overlapped may have met what they stored meanwhile; one that a load balancer placed may have
    run on any rank.
    """
    overlapped = _overlapped(log)
    finishes = {entry["rid"]: entry for entry in log if entry.get("ev") == "finish" and "rid" in entry}
    starts: list[int] = []
    entries: list[Entry] = []
    for entry in log:
        entries.append(entry)
        if entry.get("ev") != "submit":
            continue
        starts.append(entry.get("after_frame", 0))
        unranked = entry.get("dp_rank", 0) is None
        finish = finishes.get(entry.get("rid"))
        if finish is not None and "num_cached_tokens" in finish and (counts_unranked or not unranked):
            cause = "rank_not_in_log" if unranked else "overlapped" if entry["rid"] in overlapped else None
            decision = {"rid": entry["rid"], "step": len(starts), "num_cached_tokens": finish["num_cached_tokens"]}
            entries.append({"ev": "scheduled", "unknowable": cause, **decision})
    stepped = [msgspec.structs.replace(frame, step=bisect_right(starts, frame.number)) for frame in frames]
    return msgspec.structs.replace(capture, frames=tuple(stepped), log=tuple(entries))


def _overlapped(log: Sequence[Entry]) -> set[str]:
    """Return the requests during which another one ran."""
    running: set[str] = set()
    overlapped: set[str] = set()
    for entry in log:
        if entry.get("ev") == "submit":
            running.add(entry["rid"])
            if len(running) > 1:
                overlapped |= running
        elif entry.get("ev") in ("finish", "abort"):
            running.discard(entry.get("rid", ""))
    return overlapped
