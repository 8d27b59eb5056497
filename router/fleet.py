"""What the router knows of each model's holders: a table that is read again a few times a second."""

import asyncio
from collections.abc import Callable
from typing import get_args

import msgspec
import structlog

from index.liveness import BELIEVED, Judgement, judge
from index.lookup import Question, ask
from index.store import REBUILDING, HolderRow, Store
from ops.metrics import ROUTER_HOLDERS
from schemas.errors import StaleIndex, StoreUnavailable
from schemas.events import HolderState
from schemas.profiles import Holder, Profile

log = structlog.get_logger()

_MAX_TABLES = 1000


class Member(msgspec.Struct, frozen=True):
    """One holder: its row, how far it is believed, and the question that a prompt is matched with."""

    row: HolderRow
    judgement: Judgement
    question: Question | None  # None: no profile yet


class Table(msgspec.Struct):
    """A model's holders as they were last read."""

    members: dict[Holder, Member] = {}
    index: str = "never read"  # `ready`, or why the members are not to be believed
    read_s: float = float("-inf")

    @property
    def readiness(self) -> str:
        """`ready`, or why nothing is known of any member."""
        judgements = [member.judgement for member in self.members.values()]
        if self.index == "ready" and not any(judgement.state in BELIEVED for judgement in judgements):
            return REBUILDING if any(REBUILDING in judgement.reasons for judgement in judgements) else "ready"
        return self.index


class Fleet:
    """The tables of all models that were asked about."""

    def __init__(
        self,
        store: Store,
        *,
        stale_after_s: float,
        unknown_after_s: float,
        refresh_s: float,
        clock_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._stale_after_s = stale_after_s
        self._unknown_after_s = unknown_after_s
        self._refresh_s = refresh_s
        self._clock_s = clock_s
        self._tables: dict[str, Table] = {}
        self._questions: dict[Holder, tuple[Profile, Question]] = {}
        self._reading: dict[str, asyncio.Task[Table]] = {}

    def known(self, model: str) -> Table:
        """Return the table as it is, without reading."""
        if model not in self._tables and len(self._tables) >= _MAX_TABLES:  # of names that callers made up
            self._tables = {name: table for name, table in self._tables.items() if table.members}
        return self._tables.setdefault(model, Table())

    @property
    def models(self) -> list[str]:
        """Models that were asked about and found."""
        return [model for model, table in self._tables.items() if table.members or table.index == "ready"]

    async def table(self, model: str) -> Table:
        """Return the model's table, at most `refresh_s` old; reads are shared by all who wait."""
        table = self.known(model)
        if self._clock_s() - table.read_s <= self._refresh_s:
            return table
        reading = self._reading.get(model)
        if reading is None:
            reading = self._reading[model] = asyncio.create_task(self.refresh(model))
            reading.add_done_callback(lambda _: self._reading.pop(model, None))
        return await asyncio.shield(reading)

    async def refresh(self, model: str) -> Table:
        """Read the model's holders now; without an answer the last ones stay, no longer believed."""
        table = self.known(model)
        try:
            rows = await self._store.holders(model)
        except StaleIndex:
            self._doubt(table, "index_lost", model)
        except StoreUnavailable as error:
            self._doubt(table, "store_unavailable", model, str(error))
        else:
            if table.index != "ready":
                log.info("router.index_ready", model=model, holders=len(rows))
            table.members = {row.holder: self._member(row) for row in rows}
            table.index = "ready"
        table.read_s = self._clock_s()
        self._count()
        return table

    def _member(self, row: HolderRow) -> Member:
        judgement = judge(row, stale_after_s=self._stale_after_s, unknown_after_s=self._unknown_after_s)
        question = None
        if row.profile is not None:
            known = self._questions.get(row.holder)
            if known is None or known[0] != row.profile:
                known = self._questions[row.holder] = (row.profile, ask(row.holder, row.profile))
            question = known[1]
        return Member(row, judgement, question)

    def _doubt(self, table: Table, reason: str, model: str, error: str = "") -> None:
        if table.index != reason:
            log.warning("router.index_unknown", model=model, reason=reason, error=error)
        table.index = reason

    def _count(self) -> None:
        states: dict[str, int] = dict.fromkeys(get_args(HolderState), 0)
        for table in self._tables.values():
            for member in table.members.values():
                states["unknown" if table.index != "ready" else member.judgement.state] += 1
        for state, count in states.items():
            ROUTER_HOLDERS.labels(state).set(count)
