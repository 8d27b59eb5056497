"""A subscription to a server that speaks LMCache's wire: losses, restarts and silence, over loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relays.engine_events import Decoded
from relays.lmcache_mp import MAX_BATCH_BYTES, lmcache_profile
from relays.mirror import Mirror
from relays.pools import lmcache_stream
from relays.pools.lmcache_stream import KvEventStream
from tests.support.engines import chain
from tests.support.lmcache_frames import message
from tests.support.lmcache_server import LmcacheServer
from tests.support.running import running
from tests.support.waiting import until

CHUNK = 4
MODEL, OTHER = "org/model", "org/other"

pytestmark = pytest.mark.timeout(120)


class Pool:
    """A mirror that does as a subscription says, and remembers it."""

    def __init__(self, server: LmcacheServer, model: str = MODEL, **settings: Any) -> None:
        self.said: list[str] = []
        self.cursor = 0
        self.rejects = 0
        self.mirror = Mirror(lmcache_profile("m", "node7", CHUNK))
        self.stream = KvEventStream(
            server.endpoint,
            model,
            CHUNK,
            on_events=self._apply,
            on_restart=self._restart,
            on_gap=lambda reason: self.said.append(f"gap {reason}"),
            on_connection=lambda connected: self.said.append("up" if connected else "down"),
            **settings,
        )
        self._server = server
        self._model = model

    def agrees(self) -> bool:
        """Return whether the mirror names exactly the chunks that the server holds."""
        return {name for _, name in self.mirror.engine_table("host")} == set(self._server.resident.get(self._model, {}))

    def _apply(self, model: str, decoded: Decoded) -> None:
        assert model == self._model
        self.cursor = decoded.sequence
        self.rejects += len(decoded.rejects)
        self.mirror.apply(decoded.events)

    def _restart(self, reason: str) -> None:
        self.said.append(f"restart {reason}")
        self.mirror.drop_copies()


@asynccontextmanager
async def listening(server: LmcacheServer, model: str = MODEL, **settings: Any) -> AsyncIterator[Pool]:
    """Subscribe for the time of a block."""
    pool = Pool(server, model, **settings)
    async with running(pool.stream):
        yield pool


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_stream, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(lmcache_stream, "_LONGEST_PAUSE_S", 0.2)


def tokens(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * CHUNK))


async def test_what_was_stored_before_and_after_is_mirrored() -> None:
    """The log is read from its beginning; another model's records move the cursor and nothing else."""
    async with LmcacheServer(CHUNK) as server:
        names = server.store(MODEL, tokens(3))
        server.store(OTHER, tokens(5))
        async with listening(server) as pool, listening(server, OTHER) as other:
            await until(lambda: pool.agrees() and other.agrees())
            server.evict(MODEL, names[2])
            server.store(MODEL, tokens(1, first=100))
            await until(lambda: pool.agrees() and pool.cursor == 10)
            held = {*chain(tokens(2), CHUNK), *chain(tokens(1, first=100), CHUNK)}
            assert dict(pool.mirror.resident()).keys() == held
            assert pool.said == other.said == ["up"]
            assert not pool.rejects


async def test_more_records_than_a_batch_holds_come_in_several() -> None:
    """1024 records a batch, in order."""
    async with LmcacheServer(CHUNK) as server:
        server.store(MODEL, tokens(2500))
        async with listening(server) as pool:
            await until(lambda: pool.agrees() and pool.cursor == 2500)
            assert pool.said == ["up"]


async def test_a_lost_connection_is_taken_up_at_the_cursor() -> None:
    """Nothing is withdrawn, and what happened meanwhile is caught up with."""
    async with LmcacheServer(CHUNK) as server:
        names = server.store(MODEL, tokens(3))
        async with listening(server) as pool:
            await until(pool.agrees)
            await server.stop()
            await until(lambda: pool.said == ["up", "down"])
            server.evict(MODEL, names[2])
            server.store(MODEL, tokens(4, first=50))
            async with server:
                await until(lambda: pool.agrees() and pool.said == ["up", "down", "up"])
            assert server.cursors == [0, 3]


async def test_a_subscription_that_the_server_closes_is_made_again() -> None:
    """As after a time without pings; nothing is lost by it."""
    async with LmcacheServer(CHUNK) as server:
        server.store(MODEL, tokens(3))
        async with listening(server) as pool:
            await until(pool.agrees)
            server.end_streams()
            await until(lambda: pool.said == ["up", "down", "up"])
            server.store(MODEL, tokens(5))
            await until(pool.agrees)
            assert server.cursors == [0, 3]


async def test_a_restarted_server_voids_all_and_is_read_from_its_start() -> None:
    """Also where its new log is longer than the cursor, which would hide its beginning."""
    async with LmcacheServer(CHUNK) as server:
        server.store(MODEL, tokens(3))
        async with listening(server) as pool:
            await until(pool.agrees)
            await server.restart()
            server.store(MODEL, tokens(6, first=200))
            await until(lambda: pool.agrees() and pool.said[-1] == "up")
            assert pool.said == ["up", "down", "restart server_restarted", "up"]
            assert server.cursors[-2:] == [3, 0]
            await server.restart()
            await until(lambda: pool.said[3:] == ["up", "down", "restart server_restarted", "up"])
            assert not pool.mirror.blocks


async def test_a_dropped_event_voids_all_that_came_before() -> None:
    """The event may have been a removal; what is stored afterwards counts."""
    async with LmcacheServer(CHUNK) as server:
        server.store(MODEL, tokens(3))
        async with listening(server) as pool:
            await until(pool.agrees)
            server.lose()
            await until(lambda: pool.said == ["up", "restart events_lost"])
            assert not pool.mirror.blocks
            names = server.store(MODEL, tokens(2, first=300))
            await until(lambda: {name for _, name in pool.mirror.engine_table("host")} == set(names))


async def test_a_log_that_overflowed_voids_all_but_its_rest() -> None:
    """Records that a subscriber did not fetch in time are gone; those still there come with the loss."""
    async with LmcacheServer(CHUNK, log_size=4) as server:
        server.store(MODEL, tokens(3))
        async with listening(server) as pool:
            await until(pool.agrees)
            await server.stop()
            names = server.store(MODEL, tokens(6, first=400))
            async with server:
                await until(lambda: {name for _, name in pool.mirror.engine_table("host")} == set(names[2:]))
                assert pool.said[2:] == ["restart events_lost", "up"]


async def test_a_log_whose_beginning_is_gone_is_no_reason_to_withdraw() -> None:
    """Nothing was announced before the first contact; what the log no longer holds stays unknown."""
    async with LmcacheServer(CHUNK, log_size=2) as server:
        names = server.store(MODEL, tokens(5))
        async with listening(server) as pool:
            await until(lambda: {name for _, name in pool.mirror.engine_table("host")} == set(names[3:]))
            assert pool.said == ["gap events_lost", "up"]


async def test_a_server_without_a_log_is_asked_again_until_it_has_one() -> None:
    """It answers and closes; a restart with a log is found."""
    async with LmcacheServer(CHUNK, log_size=0) as server, listening(server) as pool:
        await until(lambda: len(server.cursors) > 2)
        assert set(pool.said) == {"gap events_disabled", "down"}
        await server.restart(log_size=100)
        server.store(MODEL, tokens(3))
        await until(pool.agrees)
        assert pool.said[-1] == "up"


GARBAGE: list[Callable[[], bytes]] = [
    lambda: b"\xff" * 40,
    lambda: message({"seq": 3, "kind": "removed"}, next_cursor=1),
    lambda: b"\0" * (MAX_BATCH_BYTES + 1),
]


@pytest.mark.parametrize("payload", GARBAGE, ids=["no protobuf", "out of order", "too large"])
async def test_a_message_that_cannot_be_read_voids_all_and_is_passed(payload: Callable[[], bytes]) -> None:
    """What it said is not known; the stream goes on behind the log, so that it is not met again."""
    async with LmcacheServer(CHUNK) as server:
        server.store(MODEL, tokens(3))
        async with listening(server) as pool:
            await until(pool.agrees)
            server.send_instead(payload())
            await until(lambda: pool.said[1:] == ["restart message_refused", "down", "gap events_lost", "up"])
            names = server.store(MODEL, tokens(1, first=900))
            await until(lambda: {name for _, name in pool.mirror.engine_table("host")} == set(names))


async def test_a_server_is_told_that_somebody_listens() -> None:
    """A subscription without pings would be closed."""
    async with LmcacheServer(CHUNK) as server, listening(server, ping_s=0.05) as pool:
        await until(lambda: server.pings > 2)
        assert pool.said == ["up"]


async def test_a_frozen_server_is_noticed() -> None:
    """It takes connections and answers nothing: neither an idle stream nor a new one counts as heard."""
    async with LmcacheServer(CHUNK) as server, listening(server, ping_s=0.05, timeout_s=0.5) as pool:
        await until(lambda: pool.said == ["up"])
        server.frozen = True
        await until(lambda: pool.said == ["up", "down"] and len(server.cursors) > 2)
        server.frozen = False
        server.end_streams()
        server.store(MODEL, tokens(1))
        await until(pool.agrees)
        assert pool.said == ["up", "down", "up"]


async def test_a_server_that_is_not_there_is_waited_for() -> None:
    """A relay may start first."""
    async with LmcacheServer(CHUNK) as server:
        await server.stop()
        async with listening(server) as pool:
            await until(lambda: pool.said == ["down"])
            async with server:
                server.store(MODEL, tokens(2))
                await until(pool.agrees)
            assert pool.said[:2] == ["down", "up"]
