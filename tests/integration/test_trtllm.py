"""A relay that asks a simulated TensorRT-LLM server, and a real Kafka: the topic amounts to what the server caches."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from index.digests import index_digest
from index.hashing import unpack_hashes
from index.store import HolderRow
from ops.kafka_client import client_options
from ops.settings import Settings
from ops.stack import Stack
from relays.dialects import EngineSettings
from relays.process import Relay, RelayConfig, spread_ranks
from schemas.events import BlocksRemoved, BlocksStored, Heartbeat
from schemas.profiles import GroupClass, Profile, Rank, class_bits
from schemas.topics import topic_specs
from streams.topics import create_topics
from tests.support.engines import chain
from tests.support.fake_engine import TOPIC, FakeEngine
from tests.support.payloads import pack
from tests.support.running import running
from tests.support.topic_index import TopicIndex
from tests.support.trtllm_engine import EventServer, Fault, TreeEngine
from tests.support.trtllm_events import SIZE
from tests.support.waiting import until

PARTITIONS = 2
FAST = Settings(relay_heartbeat_s=0.1, relay_idle_poll_s=0.05, relay_unknown_after_s=1.0)
DEADLINE_S = 40.0
FULL = GroupClass("full", None, SIZE)


class Bench:
    """A server, the relay that asks it, and what the relay's records amount to."""

    def __init__(self, brokers: str, model: str, *engines: TreeEngine, index: TopicIndex) -> None:
        self.model = model
        self.brokers = brokers
        self.index = index
        self.server = EventServer(*engines)

    @property
    def arguments(self) -> list[str]:
        """What `kvatlas relay` is told."""
        told = ["--model", self.model, "--replica", "r", "--engine", "trtllm", "--engine-version", "1.2.0"]
        return [*told, "--events", self.server.url, "--set", f"block_size={SIZE}"]

    @asynccontextmanager
    async def relaying(self, *, ranks: int = 1) -> AsyncIterator[Relay]:
        """A relay in this process."""
        config = RelayConfig(
            model=self.model,
            replica="r",
            engine="trtllm",
            version="1.2.0",
            ranks=spread_ranks(self.server.url, None, ranks),
            settings=EngineSettings(block_size=SIZE),
        )
        async with running(Relay(config, FAST, client_options(self.brokers))) as relay:
            yield relay

    def act(self, times: int = 40) -> None:
        """Let every engine do something, that often."""
        for engine in self.server.engines:
            for _ in range(times):
                engine.act()

    def speak(self, rank: int = 0) -> None:
        """Let one engine do something that it announces."""
        engine = self.server.engines[rank]
        while not engine.events:
            engine.act()

    def held(self) -> set[int]:
        """Return the blocks that rank 0's records leave in the index, in its newest life."""
        held: set[int] = set()
        life = 0
        for record in self.index.records:
            if record.rank == 0 and record.life >= life:
                held = held if record.life == life else set()
                life = record.life
                for event in record.events:
                    if isinstance(event, BlocksStored):
                        held |= set(unpack_hashes(event.blocks))
                    elif isinstance(event, BlocksRemoved):
                        held -= set(unpack_hashes(event.blocks))
        return held

    async def row(self, rank: int = 0) -> HolderRow:
        """Return what the index knows of a rank."""
        row = await self.index.row("r", rank)
        assert row is not None
        return row

    async def told(self, rank: int = 0, above_life: int = 0) -> bool:
        """Return whether the index has applied the last event that a rank's engine announced, and believes it."""
        row = await self.index.row("r", rank)
        last = self.server.engines[rank].next - 1
        if row is None or row.broken or row.life <= above_life:
            return False
        return row.state == "live" and row.applied == {"0": last}

    async def settle(self, *ranks: int, above_life: int = 0) -> None:
        """Wait until the index is up to date with ranks, rank 0 by default; then it must equal their caches."""
        for rank in ranks or (0,):
            await until(partial(self.told, rank, above_life), DEADLINE_S)
            profile = (await self.row(rank)).profile
            assert profile is not None
            assert await self.index.digest("r", rank) == self._truth(rank, profile)

    async def state(self, wanted: str, reason: str = "", rank: int = 0) -> None:
        """Wait until the relay says that of a rank."""

        async def says() -> bool:
            row = await self.index.row("r", rank)
            return row is not None and row.state == wanted and (not reason or row.reason == reason)

        await until(says, DEADLINE_S)

    async def fault(self, *faults: Fault) -> None:
        """Let the next polls go wrong, and wait until they did."""
        self.server.faults.extend(faults)
        await until(lambda: not self.server.faults, DEADLINE_S)

    def _truth(self, rank: int, profile: Profile) -> int:
        held = self.server.engines[rank].resident(self.model)
        bits = class_bits(profile.pairs)
        return index_digest((place, bits[FULL][tier]) for place, tier in held.items())


@asynccontextmanager
async def benched(kafka: str, model: str, *engines: TreeEngine) -> AsyncIterator[Bench]:
    await create_topics(kafka, topic_specs([model], PARTITIONS))
    async with TopicIndex(kafka, model, PARTITIONS) as index:
        bench = Bench(kafka, model, *(engines or (TreeEngine(),)), index=index)
        async with bench.server:
            yield bench


# ---- following a server


async def test_the_index_follows_a_server(kafka: str, unique_name: str) -> None:
    """Stores, moves and cascading removals, poll by poll, in one life."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        for _ in range(10):
            bench.act()
            await bench.settle()
        assert len({record.life for record in bench.index.records}) == 1


async def test_what_was_announced_before_the_relay_came_is_in_its_first_answer(kafka: str, unique_name: str) -> None:
    """The server's buffer keeps it."""
    async with benched(kafka, unique_name) as bench:
        bench.act(200)
        async with bench.relaying():
            await bench.settle()


async def test_a_relay_that_comes_late_begins_where_it_came(kafka: str, unique_name: str) -> None:
    """What another client has taken is lost, and all that hangs on it earns nothing; no block is credited wrongly."""
    async with benched(kafka, unique_name) as bench:
        bench.act(50)
        bench.server.engines[0].drain()
        async with bench.relaying():
            await bench.state("silent")
            bench.act(50)
            await until(bench.told, DEADLINE_S)
            assert len({record.life for record in bench.index.records}) == 1
            assert set() < bench.held() < set(bench.server.engines[0].resident(bench.model))


async def test_a_server_without_requests_is_silent(kafka: str, unique_name: str) -> None:
    """It answers, and nobody has seen an event."""
    engine = TreeEngine()
    engine.drain()
    async with benched(kafka, unique_name, engine) as bench, bench.relaying():
        await bench.state("silent", "no event seen yet")


async def test_several_windows_are_an_upper_bound(kafka: str, unique_name: str) -> None:
    """Each announces its own copy of every event; the largest is credited, and the answer is marked."""
    async with benched(kafka, unique_name, TreeEngine(windows=(256, 4096))) as bench, bench.relaying():
        for _ in range(3):
            bench.act()
            await bench.settle()
        row = await bench.row()
        assert row.profile is not None
        assert (row.profile.window_sizes, row.profile.upper_bound) == ((4096, 256), True)


async def test_a_larger_window_is_a_new_life(kafka: str, unique_name: str) -> None:
    """What was credited before was a smaller window's copy."""
    engine = TreeEngine(windows=(256,))
    async with benched(kafka, unique_name, engine) as bench, bench.relaying():
        bench.act()
        await bench.settle()
        life = (await bench.row()).life
        assert engine.resident(bench.model)
        larger = TreeEngine(windows=(4096,))  # of the same engine: its numbers go on
        for _ in range(20):
            larger.act()
        for event in larger.events:
            event["event_id"] += engine.next
        larger.next += engine.next
        bench.server.engines = [larger]
        await bench.settle(above_life=life)


async def test_ranks_come_with_their_events(kafka: str, unique_name: str) -> None:
    """Attention-DP ranks share one answer and are holders of their own; only the first was known beforehand."""
    engines = [TreeEngine(rank, rank=rank) for rank in range(3)]
    async with benched(kafka, unique_name, *engines) as bench, bench.relaying():
        for _ in range(4):
            bench.act()
            await bench.settle(0, 1, 2)
        assert len({record.life for record in bench.index.records}) == 3


# ---- polls that fail


async def test_a_refused_poll_loses_nothing(kafka: str, unique_name: str) -> None:
    """Until the next event the rank is stale; that one follows, so the life goes on."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        bench.act()
        await bench.settle()
        life = (await bench.row()).life
        await bench.fault("refused", "refused")
        await bench.state("stale", "poll_failed")
        bench.act()
        await bench.settle()
        assert (await bench.row()).life == life


@pytest.mark.parametrize("fault", ["lost", "cut", "garbage"])
async def test_an_answer_that_is_lost_is_a_gap(kafka: str, unique_name: str, fault: Fault) -> None:
    """What it held is gone: the next event does not follow, and the rank begins anew with what it announces."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        bench.act()
        await bench.settle()
        life = (await bench.row()).life
        bench.server.faults.append(fault)
        bench.speak()
        await bench.state("stale", "poll_failed")
        bench.act()
        await until(partial(bench.told, above_life=life), DEADLINE_S)
        assert bench.held() <= set(bench.server.engines[0].resident(bench.model))


async def test_only_the_rank_with_a_gap_begins_anew(kafka: str, unique_name: str) -> None:
    """After a lost answer every rank is stale; each one's next event decides for it alone."""
    engines = [TreeEngine(rank, rank=rank) for rank in range(2)]
    async with benched(kafka, unique_name, *engines) as bench, bench.relaying(ranks=2):
        bench.act()
        await bench.settle(0, 1)
        lives = [(await bench.row(rank)).life for rank in (0, 1)]
        bench.server.faults.append("lost")
        bench.speak(0)  # its events are in the lost answer, the other's are not
        for rank in (0, 1):
            await bench.state("stale", "poll_failed", rank)
        bench.speak(1)
        await bench.settle(1)
        await bench.state("stale", "poll_failed", 0)
        bench.speak(0)
        await until(partial(bench.told, above_life=lives[0]), DEADLINE_S)
        assert (await bench.row(1)).life == lives[1]


async def test_a_server_that_is_away_is_unknown_and_then_followed_again(kafka: str, unique_name: str) -> None:
    """Stale at once, unknown after a while; the same engine, back at its address, goes on in its life."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        bench.act()
        await bench.settle()
        life = (await bench.row()).life
        await bench.server.stop()
        await bench.state("stale", "disconnected")
        await bench.state("unknown", "disconnected")
        await bench.server.restart(*bench.server.engines)
        await bench.state("stale", "poll_failed")
        bench.act()
        await bench.settle()
        assert (await bench.row()).life == life


async def test_a_restarted_server_is_a_new_life(kafka: str, unique_name: str) -> None:
    """It counts from 0 again, and nothing of its old cache is credited any more."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        bench.act()
        await bench.settle()
        life = (await bench.row()).life
        await bench.server.restart(TreeEngine(7))
        bench.act(3)
        await bench.settle(above_life=life)


async def test_a_relay_may_start_before_its_server(kafka: str, unique_name: str) -> None:
    """It asks until somebody answers."""
    async with benched(kafka, unique_name) as bench:
        await bench.server.stop()
        async with bench.relaying():
            await until(lambda: bool(bench.index.beats("r")), DEADLINE_S)
            (beat,) = bench.index.beats("r")[0].events
            assert isinstance(beat, Heartbeat)
            assert (beat.state in ("stale", "unknown"), beat.reason) == (True, "disconnected")
            await bench.server.restart(TreeEngine())
            bench.act()
            await bench.settle()


# ---- its V2 manager's own stream


async def test_a_published_stream_is_followed(kafka: str, unique_name: str) -> None:
    """Over ZMQ there are sequences, replays and ranks as with any engine that publishes."""
    root = hashlib.sha256(b"\0").digest()
    name = int.from_bytes(
        hashlib.sha256(root + b"".join(t.to_bytes(4, "little") for t in range(4))).digest()[-8:], "big"
    )
    always = {"block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    chain_of_two = {"block_hashes": [name, 7], "parent_block_hash": None, "token_ids": list(range(8)), **always}
    hidden = {"block_hashes": [8], "parent_block_hash": None, "token_ids": [9, 9, 9, 9], **always}
    await create_topics(kafka, topic_specs([unique_name], PARTITIONS))
    async with TopicIndex(kafka, unique_name, PARTITIONS) as index, FakeEngine() as engine:
        config = RelayConfig(
            model=unique_name,
            replica="r",
            engine="trtllm",
            version="1.3.0",
            ranks=(Rank(0, engine.events, engine.replay),),
            topic=TOPIC.decode(),
            settings=EngineSettings(transport="zmq"),
        )
        engine.lose(pack([1.0, [{"type": "BlockStored", **chain_of_two}], 0]))  # only the replay has it
        async with running(Relay(config, FAST, client_options(kafka))):
            await engine.publish(pack([2.0, [{"type": "BlockStored", **hidden}], 0]))
            await engine.publish(pack([3.0, [{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}], 0]))

            async def told() -> bool:
                row = await index.row("r")
                return row is not None and row.state == "live" and row.applied == {"0": 2}

            await until(told, DEADLINE_S)
            (first,) = chain(range(4), model=unique_name)
            assert await index.digest("r") == index_digest([(first, 1)])


# ---- the process


async def test_the_command_follows_a_server(kafka: str, unique_name: str, tmp_path: Path) -> None:
    """`kvatlas relay --engine trtllm --events http://…`; after `kill -9` the next one begins a higher life."""
    async with benched(kafka, unique_name) as bench:
        options = {"RELAY_HEARTBEAT_S": "0.1"}
        stack = Stack([bench.model], brokers=kafka, redis_url="redis://127.0.0.1:1", folder=tmp_path, options=options)
        stack.start_relay(bench.arguments)
        bench.act()
        await bench.settle()
        life = (await bench.row()).life
        await stack.stop_part("relay", hard=True)
        await bench.server.restart(TreeEngine(3))
        bench.act()
        stack.start_relay(bench.arguments)
        await bench.settle(above_life=life)
        await stack.stop_part("relay")
