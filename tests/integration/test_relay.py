"""A relay between an engine's real sockets and a real Kafka: what the topic amounts to equals what the engine said."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from prometheus_client import REGISTRY

from index.digests import index_digest
from ops.embedded.kafka import EmbeddedKafka
from ops.settings import Settings
from ops.stack import Stack
from schemas.control import Resync, encode_control
from schemas.events import Heartbeat
from schemas.profiles import ReplicaEntry, encode_entry
from schemas.topics import CONTROL, REPLICAS, topic_specs
from streams.topics import create_topics
from tests.support.bench import DEADLINE_S, Bench
from tests.support.fake_engine import TOPIC, Traffic
from tests.support.topic_index import TopicIndex
from tests.support.waiting import until

PARTITIONS = 2
UNKNOWN_RANK = 7


@asynccontextmanager
async def benched(brokers: str, model: str, **options: Any) -> AsyncIterator[Bench]:
    """A bench whose index is what the records in its topic amount to."""
    await create_topics(brokers, topic_specs([model], PARTITIONS))
    async with TopicIndex(brokers, model, PARTITIONS) as index, Bench(brokers, model, index, **options) as bench:
        yield bench


def heard_by(bench: Bench) -> TopicIndex:
    """Return the bench's index as what it is here."""
    assert isinstance(bench.index, TopicIndex)
    return bench.index


def rejected(reason: str) -> float:
    """Return how many messages were refused in this process for that reason."""
    return REGISTRY.get_sample_value("kvatlas_relay_rejects_total", {"engine": "vllm", "reason": reason}) or 0.0


# ---- following an engine


@pytest.mark.parametrize("topic_in_replays", [True, False])
async def test_what_was_published_before_the_relay_comes_from_the_ring(
    kafka: str, unique_name: str, topic_in_replays: bool
) -> None:
    """In both framings of replays; what is published meanwhile follows without a gap, in the same life."""
    async with benched(kafka, unique_name, topic_in_replays=topic_in_replays) as bench:
        await bench.publish(50)
        async with bench.relaying():
            await bench.publish(50)
            await bench.settle()
            await bench.publish(20)
            await bench.settle()
        assert bench.engines[0].asked[0] == 0
        assert len({record.life for record in heard_by(bench).records}) == 1


async def test_messages_of_another_topic_come_from_no_ring_either(kafka: str, unique_name: str) -> None:
    """A relay that is told a topic which its engine does not publish under hears nothing, and is not believed live."""
    before = rejected("topic")
    async with benched(kafka, unique_name) as bench:
        await bench.publish(5)
        bench.config = msgspec.structs.replace(bench.config, topic="another")
        async with bench.relaying():

            async def silent() -> bool:
                row = await bench.index.row(bench.replica)
                return row is not None and row.state == "silent"

            await until(silent, DEADLINE_S)
        assert (await bench.row()).received == {}
    assert rejected("topic") >= before + 5


async def test_lost_messages_are_healed(kafka: str, unique_name: str) -> None:
    """Gaps are filled from the ring, and a lost last message shows though the engine then says nothing."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        await bench.publish(100, lost=0.2)
        await bench.publish(3, lost=1.0)
        await bench.settle()
        assert len({record.life for record in heard_by(bench).records}) == 1


async def test_a_ring_that_forgot_begins_a_life(kafka: str, unique_name: str) -> None:
    """What is known from before the hole is gone; the index is what the messages behind it say."""
    async with benched(kafka, unique_name, ring=5) as bench, bench.relaying():
        for count in (5, 20):  # the first ones may still come from the ring
            await bench.publish(count)
            await bench.settle()
        life = (await bench.row()).life
        await bench.publish(12, lost=1.0)
        bench.truths = [bench.new_truth()]
        await bench.publish(5)
        await bench.settle(above_life=life)


async def test_a_source_without_replay_goes_on_after_a_gap(kafka: str, unique_name: str) -> None:
    """It can only begin a life there, and says that it has nobody to ask."""
    async with benched(kafka, unique_name, replay=False) as bench, bench.relaying():
        # nobody tells a publisher that a subscription reached it: the first messages may be missed
        async def heard() -> bool:
            await bench.publish(1)
            return await bench.index.row("r") is not None and bool((await bench.row()).applied)

        await until(heard, DEADLINE_S)
        life = (await bench.row()).life
        await bench.publish(3, lost=1.0)
        bench.truths = [bench.new_truth()]
        await bench.publish(10)
        await bench.settle(above_life=life)
        await _until_said(bench, "live", "no_replay")


async def test_a_restarted_engine_loses_its_credit_within_the_heartbeat_time(kafka: str, unique_name: str) -> None:
    """Under the same name, having said nothing yet; the new life is higher, and what it then says is the index."""
    async with benched(kafka, unique_name) as bench, bench.relaying(Settings()):
        await bench.publish(30)
        await bench.settle()
        life = (await bench.row()).life
        await bench.restart_engine()
        began_s = time.monotonic()
        await bench.settle(above_life=life)
        assert time.monotonic() - began_s < Settings().stale_after_s
        await bench.publish(10)
        await bench.settle(above_life=life)


async def test_an_engine_that_is_gone_is_not_believed_for_long(kafka: str, unique_name: str) -> None:
    """Its relay says so in every heartbeat: stale, then unknown, and live again when it is back."""
    settings = Settings(relay_heartbeat_s=0.1, relay_unknown_after_s=0.5)
    async with benched(kafka, unique_name) as bench, bench.relaying(settings):
        await bench.publish(3)
        await bench.settle()
        await bench.engines[0].stop()
        for state in ("stale", "unknown"):
            await _until_said(bench, state, "disconnected")
        await bench.restart_engine()
        await bench.publish(3)
        await _until_said(bench, "live")
        await bench.settle()


async def test_a_batch_of_another_rank_is_refused_and_counted(kafka: str, unique_name: str) -> None:
    """The subscription's rank was verified; what the batch says of itself was not."""
    before = rejected("rank_mismatch")
    async with benched(kafka, unique_name) as bench, bench.relaying():
        await bench.publish(5)
        stranger = Traffic(seed=9, rank=UNKNOWN_RANK)
        for _ in range(3):
            await bench.engines[0].publish(stranger.message())
        await bench.publish(5)
        await bench.settle()
    assert rejected("rank_mismatch") - before == 3


async def test_ranks_are_apart(kafka: str, unique_name: str) -> None:
    """Each has ports, numbers and an index of its own; one that restarts takes nothing from the other."""
    async with benched(kafka, unique_name, ranks=2) as bench, bench.relaying():
        await bench.publish(20, rank=0)
        await bench.publish(30, rank=1)
        await bench.settle()
        lives = [(await bench.row(rank)).life for rank in (0, 1)]
        await bench.restart_engine(1)
        await bench.publish(10, rank=0)
        await bench.publish(5, rank=1)
        await bench.settle()
        assert (await bench.row(0)).life == lives[0]
        assert (await bench.row(1)).life > lives[1]


async def test_garbage_beside_valid_traffic_is_refused(kafka: str, unique_name: str) -> None:
    """On both sockets, of any shape: it is counted, and the index is what the valid messages say."""
    rng = random.Random(5)
    reasons = ("frame_count", "sequence", "replay_frames", "batch_malformed")
    before = {reason: rejected(reason) for reason in reasons}
    async with benched(kafka, unique_name) as bench, bench.relaying():
        await bench.publish(3)
        await bench.settle()
        bench.engines[0].garbles = True
        for _ in range(20):
            await bench.publish(2, lost=0.2, seed=rng.randrange(99))
            for frames in (
                [TOPIC],
                [TOPIC, rng.randbytes(8)],
                [TOPIC, rng.randbytes(7), rng.randbytes(30)],
                [TOPIC, b"\xff" * 8, b""],
                [TOPIC, *([b"x"] * rng.randrange(3, 40))],
                [b"kvx", (0).to_bytes(8, "big"), rng.randbytes(30)],
            ):
                await bench.engines[0].send(*frames)
            payload = rng.randbytes(rng.randrange(60))
            bench.truths[0].take(await bench.engines[0].publish(payload), payload)
        await bench.settle()
        assert len({record.life for record in heard_by(bench).records}) == 1
    assert all(rejected(reason) - before[reason] >= 10 for reason in reasons)


async def test_heartbeats_come_each_second_with_the_last_engine_sequence(kafka: str, unique_name: str) -> None:
    """Whatever else is going on: here tens of thousands of messages as fast as the engine can send."""
    async with benched(kafka, unique_name) as bench, bench.relaying(Settings()):
        await bench.publish(5)
        await bench.settle()
        first = len(heard_by(bench).beats("r"))
        began_s = time.monotonic()
        message = Traffic(clears=0.0).message()
        while time.monotonic() - began_s < 4.0:
            bench.truths[0].take(await bench.engines[0].publish(message), message)
        await bench.settle()
        took_s = time.monotonic() - began_s
        await until(lambda: _received(bench) == bench.engines[0].next - 1, DEADLINE_S)
        beats = heard_by(bench).beats("r")[first:]
        assert took_s * 0.6 - 1 <= len(beats) <= took_s * 1.1 + 3
        received = [beat.events[-1].received.get("0", -1) for beat in beats if isinstance(beat.events[-1], Heartbeat)]
        assert received == sorted(received)
        assert len(set(received)) >= 3


async def test_a_request_to_tell_everything_again_begins_a_life(kafka: str, unique_name: str) -> None:
    """While the engine talks on, and as often as it is asked: the index is always equal in the end."""
    async with benched(kafka, unique_name) as bench, bench.relaying():
        await bench.publish(20)
        await bench.settle()
        life = (await bench.row()).life
        for within_s in (0.0, 0.01, 0.1, 0.0, -1.0):
            request = Resync("r", 0, "operator", within_s)
            await _send(kafka, CONTROL, encode_control(request))
            await bench.publish(40)
        await bench.settle(above_life=life)


async def test_a_life_that_is_told_in_part_is_not_live(
    kafka: str, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told again comes in many records; heartbeats between them say that there is more to come."""
    monkeypatch.setattr("relays.records._MAX_BLOCKS", 2)
    async with benched(kafka, unique_name) as bench:
        async with bench.relaying(Settings(relay_heartbeat_s=0.03, relay_records_in_flight=1)):
            await bench.publish(240)
            await bench.settle()
            life = (await bench.row()).life
            await _send(kafka, CONTROL, encode_control(Resync("r", 0, "operator", 0.0)))
            await bench.settle(above_life=life)
            await until(lambda: _states(bench, life)[-1:] == ["live"], DEADLINE_S)
        states = _states(bench, life)
        told = states.index("live")
        assert told > 0
        assert states == ["catching_up"] * told + ["live"] * (len(states) - told)


# ---- the process


async def test_sigterm_loses_nothing_that_is_owed(kafka: str, unique_name: str, tmp_path: Path) -> None:
    """Exit code 0, and all that the relay had received is in the topic."""
    async with benched(kafka, unique_name) as bench:
        stack = _stack(bench, tmp_path)
        await bench.publish(300)
        relay = stack.start_relay(bench.arguments)
        await until(lambda: bool(heard_by(bench).records), DEADLINE_S)
        publishing = asyncio.create_task(bench.publish(2000))
        await asyncio.wait({publishing}, timeout=0.1)
        await stack.stop_part("relay")
        assert relay.exit_code == 0
        await publishing
        said = json.loads(stack.log_of("relay").read_text().splitlines()[-1])
        assert said["event"] == "relay.stopped"
        assert said["owed"] == 0
        last = int(said["received"]["r/0"]["0"])

        async def told() -> bool:
            return (await bench.row()).applied == {"0": last}

        await until(told, DEADLINE_S)
        truth = bench.new_truth()
        for sequence in range(last + 1):
            truth.take(sequence, bench.engines[0].message(sequence))
        assert await bench.index.digest("r", 0) == index_digest(truth.mirror.resident())


async def test_a_killed_relay_is_followed_by_a_higher_life(kafka: str, unique_name: str, tmp_path: Path) -> None:
    """After `kill -9` at any moment the next one reads the ring again, and the index is equal."""
    async with benched(kafka, unique_name) as bench:
        stack = _stack(bench, tmp_path)
        life = 0
        for _ in range(3):
            stack.start_relay(bench.arguments)
            await bench.publish(100)
            await bench.settle(above_life=life)
            life = (await bench.row()).life
            publishing = asyncio.create_task(bench.publish(500))
            await asyncio.wait({publishing}, timeout=random.uniform(0, 0.1))
            await stack.stop_part("relay", hard=True)
            await publishing
        async with bench.relaying():
            await bench.settle(above_life=life)


async def test_a_life_is_above_all_that_kafka_knows(kafka: str, unique_name: str) -> None:
    """Where the clock went back, or another relay's ran ahead, `kv.replicas` says which life to be above."""
    async with benched(kafka, unique_name, replica=unique_name) as bench:
        ahead = time.time_ns() // 1_000_000 + 1_000_000_000
        entry = ReplicaEntry(ahead, bench.truths[0].mirror.profile)
        await _send(kafka, REPLICAS, encode_entry(entry), unique_name.encode())
        async with bench.relaying():
            await bench.publish(10)
            await bench.settle(above_life=ahead)


# ---- Kafka away


@pytest.mark.slow
async def test_an_outage_of_kafka_costs_nothing_but_time(own_kafka: EmbeddedKafka, unique_name: str) -> None:
    """Longer than a producer outlives, with an engine that talks on: bounded memory, no hole, one life, equal after.

    A second relay that starts while Kafka is away follows an engine whose ring soon forgets, and loses nothing.
    """
    settings = Settings(relay_heartbeat_s=0.2, relay_probe_s=0.8, kafka_request_timeout_ms=2_000)
    replaced = REGISTRY.get_sample_value("kvatlas_relay_producers_total") or 0.0
    async with AsyncExitStack() as exits:
        bench = await exits.enter_async_context(benched(own_kafka.bootstrap, unique_name))
        late = await exits.enter_async_context(benched(own_kafka.bootstrap, f"{unique_name}-late", ring=10))
        relay = await exits.enter_async_context(bench.relaying(settings))
        await bench.publish(50)
        await bench.settle()
        await own_kafka.stop(hard=True)
        late_relay = await exits.enter_async_context(late.relaying(settings))
        began_s = time.monotonic()
        while time.monotonic() - began_s < 8.0:
            await bench.publish(20)
            await late.publish(1)
            assert relay.owed <= settings.relay_records_in_flight + 8
            assert late_relay.owed <= settings.relay_records_in_flight + 8
        await own_kafka.start()
        await bench.publish(50)
        await bench.settle()
        await late.settle()
        assert (REGISTRY.get_sample_value("kvatlas_relay_producers_total") or 0.0) > replaced
        living = sum("_sender_routine" in repr(task.get_coro()) for task in asyncio.all_tasks())
        assert living == 2, "a dead producer lives on"
        for index in (heard_by(bench), heard_by(late)):
            assert len({record.life for record in index.records}) == 1
            last = 0
            for record in index.records:
                assert record.sequence <= last + 1
                last = max(last, record.sequence)


# ---- helpers


def _stack(bench: Bench, folder: Path) -> Stack:
    """Return where processes are started: nothing but relays here."""
    options = {"RELAY_HEARTBEAT_S": "0.2", "RELAY_PROBE_S": "0.8"}
    return Stack([bench.model], brokers=bench.brokers, redis_url="redis://127.0.0.1:1", folder=folder, options=options)


def _states(bench: Bench, above_life: int) -> list[str]:
    """Return what heartbeats of later lives say, in order, once there is a record of that life."""
    beats = [beat for beat in heard_by(bench).beats("r") if beat.life > above_life and beat.sequence > 0]
    return [beat.events[-1].state for beat in beats if isinstance(beat.events[-1], Heartbeat)]


def _received(bench: Bench) -> int:
    event = heard_by(bench).beats("r")[-1].events[-1]
    return event.received.get("0", -1) if isinstance(event, Heartbeat) else -1


async def _until_said(bench: Bench, state: str, reason: str = "") -> None:
    async def said() -> bool:
        row = await bench.row()
        return row.state == state and row.reason == reason

    await until(said, DEADLINE_S)


async def _send(brokers: str, topic: str, value: bytes, key: bytes | None = None) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=brokers)
    await producer.start()
    try:
        await producer.send_and_wait(topic, value, key=key)
    finally:
        await producer.stop()
