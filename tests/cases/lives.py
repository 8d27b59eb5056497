"""Which life of its replica each line of a case belongs to: `inc` and `uid` name lives, `up` begins one."""

from collections.abc import Sequence

import msgspec

from tests.cases.notation import Control, Message, Step


class _Life(msgspec.Struct, eq=False):
    inc: int | None
    uid: str | None
    rank_inc: int  # its own, or that of the life before it
    seen: int  # in the order of the file


def lives_of(steps: Sequence[Step]) -> dict[int, int]:
    """Return for the position of each message and control its life's number, 0 being the replica's oldest.

    A life is older than another with a higher `inc`, and else than those that the file names later. A line that names
    none belongs to the newest life so far.
    """
    known: dict[str, list[_Life]] = {}
    at: dict[int, tuple[str, _Life]] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Message | Control) and step.sender is not None:
            lives = known.setdefault(step.sender, [])
            at[position] = (step.sender, _life(step, lives))
    numbers = {
        sender: {life: number for number, life in enumerate(sorted(lives, key=_age))} for sender, lives in known.items()
    }
    return {position: numbers[sender][life] for position, (sender, life) in at.items()}


def _life(step: Message | Control, lives: list[_Life]) -> _Life:
    newest = max(lives, key=_age, default=None)
    if step.inc is not None or step.uid is not None:
        for life in reversed(lives):
            if step.inc in (None, life.inc) and step.uid in (None, life.uid):
                return life
    elif newest is not None and not (isinstance(step, Control) and step.name in ("up", "restart")):
        return newest
    inherited = newest.rank_inc if newest is not None else 0
    life = _Life(step.inc, step.uid, inherited if step.inc is None else step.inc, len(lives))
    lives.append(life)
    return life


def _age(life: _Life) -> tuple[int, int]:
    return life.rank_inc, life.seen
