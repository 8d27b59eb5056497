"""The poller and a server on loopback, without Kafka: what it takes, what it refuses and how long it waits."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from relays import trtllm_poller
from relays.engine import EngineRank
from relays.source import Owner
from relays.trtllm_poller import EventPoller, PulledRank
from schemas.events import Heartbeat
from schemas.profiles import Holder
from tests.support.running import running
from tests.support.trtllm_engine import EventServer, TreeEngine
from tests.support.trtllm_events import known
from tests.support.waiting import until


class Polled:
    """A poller's ranks, with the lives that they began."""

    def __init__(self) -> None:
        self.ranks: list[PulledRank] = []
        self._lives = itertools.count(1)

    def new_rank(self, number: int) -> PulledRank:
        """Return another rank."""
        engine = EngineRank(known(), Holder("r", number), next(self._lives))
        rank = PulledRank(engine, Owner(lambda: next(self._lives), lambda: None, 1000.0))
        self.ranks.append(rank)
        return rank

    def state(self, rank: int = 0) -> tuple[str, str]:
        """Return what a rank's heartbeat says."""
        (beat,) = self.ranks[rank].beat(asyncio.get_running_loop().time()).events
        assert isinstance(beat, Heartbeat)
        return beat.state, beat.reason


@asynccontextmanager
async def polling(url: str, **how: Any) -> AsyncIterator[Polled]:
    polled = Polled()
    options = {"idle_s": 0.02, "timeout_s": 5.0, **how}
    poller = EventPoller(url, [polled.new_rank(0)], polled.new_rank, **options)
    async with running(poller):
        yield polled


async def test_a_burst_is_taken_whole_and_others_get_their_turn() -> None:
    """Thousands of events in one answer reach the mirror, while other tasks go on."""
    engine = TreeEngine()
    while engine.next < 5000:
        engine.act()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with EventServer(engine) as server, polling(server.url) as polled:
        counting = asyncio.create_task(count())
        await until(lambda: polled.ranks[0].engine.received == {"0": engine.next - 1})
        counting.cancel()
        assert turns > 100
        assert {place for place, _ in polled.ranks[0].engine.mirror.resident()} == set(engine.resident("m"))
        assert polled.state() == ("live", "no_replay")


async def test_a_wrong_path_is_a_failed_poll() -> None:
    """A server that has no such path answers 404; the rank is stale, and the relay goes on asking."""
    async with EventServer(TreeEngine()) as server, polling(f"{server.url}/v1/events") as polled:
        await until(lambda: polled.state() == ("stale", "disconnected"))
        assert polled.ranks[0].engine.received == {}


async def test_an_answer_that_is_too_large_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is taken; its events are lost, so the next one shows a gap."""
    engine = TreeEngine()
    async with EventServer(engine) as server, polling(server.url) as polled:
        await until(lambda: polled.ranks[0].engine.received == {"0": 0})
        monkeypatch.setattr(trtllm_poller, "MAX_DRAIN_BYTES", 10)
        while engine.next < 20:
            engine.act()
        await until(lambda: polled.state() != ("live", "no_replay"))
        monkeypatch.undo()
        assert polled.ranks[0].engine.received == {"0": 0}
        while engine.next < 40:
            engine.act()
        await until(lambda: polled.ranks[0].engine.received == {"0": engine.next - 1})
        assert polled.ranks[0].engine.voice.life == 2


async def test_an_event_that_cannot_be_read_is_a_gap() -> None:
    """An event without a number costs itself; the one after it does not follow."""
    engine = TreeEngine()
    while engine.next < 5:
        engine.act()
    engine.events[2].pop("event_id")
    async with EventServer(engine) as server, polling(server.url) as polled:
        await until(lambda: polled.ranks[0].engine.received == {"0": engine.next - 1})
        assert polled.ranks[0].engine.voice.life == 2


async def test_a_server_that_does_not_answer_is_given_up_and_asked_again() -> None:
    """Past the time-out the poll has failed."""
    engine = TreeEngine()
    hang = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hang.wait()
        writer.close()

    async with EventServer(engine) as server:
        await server.stop()
        silent = await asyncio.start_server(serve, "127.0.0.1", int(server.url.rpartition(":")[2]))
        async with polling(server.url, timeout_s=0.1) as polled:
            await until(lambda: polled.state() == ("stale", "disconnected"))
            hang.set()
            silent.close()
            await silent.wait_closed()
            await server.restart(engine)
            await until(lambda: polled.ranks[0].engine.received == {"0": engine.next - 1})


async def test_an_idle_server_is_not_asked_all_the_time() -> None:
    """The pause between polls grows to its setting where nothing comes, and is short again after an event."""
    engine = TreeEngine()
    async with EventServer(engine) as server, polling(server.url, idle_s=0.3) as polled:
        await until(lambda: len(server.polled_s) == 11)  # half as long again each time, up to 0.3 s
        pauses_s = [after - before for before, after in pairwise(server.polled_s)]
        assert pauses_s[-1] >= 0.29 > 0.1 > pauses_s[0]
        while not engine.events:
            engine.act()
        await until(lambda: len(server.polled_s) == 14)
        pauses_s = [after - before for before, after in pairwise(server.polled_s)]
        assert pauses_s[-1] < 0.2
        assert polled.ranks[0].engine.received == {"0": engine.next - 1}


async def test_an_unlisted_rank_gets_a_life_of_its_own() -> None:
    """Ranks that were not known beforehand come with their first event."""
    engines = [TreeEngine(rank, rank=rank) for rank in (0, 5)]
    async with EventServer(*engines) as server, polling(server.url) as polled:
        await until(lambda: len(polled.ranks) == 2 and polled.state(1)[0] == "live")
        assert [rank.engine.holder for rank in polled.ranks] == [Holder("r", 0), Holder("r", 5)]
        assert polled.ranks[0].engine.voice.life != polled.ranks[1].engine.voice.life
