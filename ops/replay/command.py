"""`kvatlas replay`: every given recording, in process or through the stack, and the table of what was found."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from ops.replay.capture import MODEL, Capture, load_capture
from ops.replay.ranks import parts_of
from ops.replay.recordings import refused, replay
from ops.replay.score import Score, total
from ops.replay.stack import ThroughStack
from ops.settings import Settings
from ops.stack import RouterClient, Stack, given_services
from schemas.errors import ConfigError

_COLUMNS = ("compared", "exact", "over_tokens", "under_tokens", "coverage", "over_credit", "states", "host_states")


async def replay_all(folders: Sequence[Path], *, stack: bool, as_json: bool, settings: Settings) -> int:
    """Print each recording's result; return 0 where all could be read and every compared request and table was equal.

    A recording that cannot be used is named with the reason, and the others go on.
    """
    given = [folder for folder in folders if not folder.is_file()]
    if not given:
        raise ConfigError("no recording among the arguments")
    scores: list[Score] = []
    unusable = 0
    if not as_json:
        _print(_row("recording", [*_COLUMNS, "excluded"]))
    async with AsyncExitStack() as exits:
        running: tuple[Stack, RouterClient] | None = None
        if stack:
            brokers, redis_url = given_services(settings)
            parts = await exits.enter_async_context(Stack([MODEL], brokers=brokers, redis_url=redis_url))
            running = parts, await exits.enter_async_context(RouterClient(parts.router_url))
        for folder in given:
            await asyncio.sleep(0)  # an in-process replay waits for nothing: here an interruption is heard
            try:
                score = await _replay(load_capture(folder), running)
            except ConfigError as error:
                unusable += 1
                _show_error(folder, error, as_json)
                continue
            scores.append(score)
            _show(score, as_json)
    if not as_json:
        _show(total(scores), as_json)
    return 0 if not unusable and all(_equal(score) for score in scores) else 1


async def _replay(capture: Capture, running: tuple[Stack, RouterClient] | None) -> Score:
    if running is None or refused(capture) is not None:
        return await replay(capture)
    scores: list[Score] = []
    for part in parts_of(capture):
        async with ThroughStack(part, *running) as way:
            scores.append(await replay(part, way))
    return scores[0] if len(scores) == 1 else total(scores, capture.name)


def _equal(score: Score) -> bool:
    """Return whether all that was compared is equal; a marked upper bound may be above the truth, never below."""
    if score.marked and not score.under_tokens:
        return (score.states_equal, score.host_states_equal) == (score.states, score.host_states)
    return (score.exact, score.states_equal, score.host_states_equal) == (
        score.compared,
        score.states,
        score.host_states,
    )


def _show_error(folder: Path, error: ConfigError, as_json: bool) -> None:
    if as_json:
        _print(msgspec.json.encode({"capture": folder.name, "error": str(error)}).decode())
    else:
        _print(f"{folder.name:<34} unusable: {error}")


def _show(score: Score, as_json: bool) -> None:
    if as_json:
        _print(msgspec.json.encode(score).decode())
        return
    values = [
        str(score.compared),
        str(score.exact),
        str(score.over_tokens),
        str(score.under_tokens),
        f"{score.coverage:.4f}",
        f"{score.over_credit:.4f}",
        f"{score.states_equal}/{score.states}",
        f"{score.host_states_equal}/{score.host_states}",
        " ".join(f"{cause}={count}" for cause, count in sorted(score.excluded.items())),
    ]
    _print(_row(score.capture, values))
    for miss in score.misses[:5]:
        _print(f"    {miss}")


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<34}" + " ".join(f"{value:>12}" for value in values)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201
