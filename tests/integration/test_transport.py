"""The guards on Faust's transport, in a small app on a real Kafka: what is committed, and where reading begins."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from ops.embedded.kafka import EmbeddedKafka
from schemas.topics import TopicSpec
from streams.topics import create_topics
from tests.support.guarded_app import GuardedApp, Outside
from tests.support.waiting import until

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def cleaning_kafka(embedded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker that compacts at once."""
    service = EmbeddedKafka(tmp_path_factory.mktemp("kafka"))
    service.properties["log.cleaner.backoff.ms"] = "100"
    asyncio.run(service.start())
    yield service.bootstrap
    asyncio.run(service.stop())


async def test_only_what_is_acknowledged_in_order_is_committed(kafka: str, unique_name: str) -> None:
    """An unfinished record stops the commits of its partition, be it the first, one of many or behind a hole."""
    await create_topics(kafka, [TopicSpec(unique_name, 4)])
    unfinished = {0: 0, 1: 5, 2: 9}
    for partition in range(4):
        await _write(kafka, unique_name, [b"%d" % number for number in range(10)], partition)
    async with GuardedApp(kafka, unique_name, holds=lambda p, offset: unfinished.get(p) == offset) as app:
        await until(lambda: len(app.taken) == 40, DEADLINE_S)
        await _until_committed(app, {1: 5, 2: 9, 3: 10})
        await _write(kafka, unique_name, [b"more"], 3)
        await _until_committed(app, {1: 5, 2: 9, 3: 11})  # another commit has gone by
        assert app.waiting() == {0: 10, 1: 5, 2: 1, 3: 0}
    assert await app.committed() == {0: 10, 1: 10, 2: 10, 3: 11}


async def test_without_the_guards_records_are_lost(kafka: str, unique_name: str) -> None:
    """Faust's own transport commits past unfinished records, so the next worker never sees them.

    Where this fails Faust has changed, and so may what the guards override.
    """
    await create_topics(kafka, [TopicSpec(unique_name, 3)])
    unfinished = {0: 0, 1: 5}
    for partition in range(3):
        await _write(kafka, unique_name, [b"%d" % number for number in range(10)], partition)
    held = GuardedApp(kafka, unique_name, holds=lambda p, offset: unfinished.get(p) == offset, guarded=False)
    async with held as app:
        await until(lambda: len(app.taken) == 30, DEADLINE_S)
        await _until_committed(app, {0: 10, 1: 10, 2: 10})


async def test_a_transactional_topic_is_committed_to_its_end(kafka: str, unique_name: str) -> None:
    """Each transaction's marker is an offset without a record; behind one, an unfinished record is not passed over."""
    await create_topics(kafka, [TopicSpec(unique_name, 2)])
    for partition in (0, 1):
        await _write_transactions(kafka, unique_name, partition, transactions=20, records=3)
    behind_a_hole = 4 * 10
    async with GuardedApp(kafka, unique_name, holds=lambda p, offset: (p, offset) == (1, behind_a_hole)) as app:
        await until(lambda: len(app.taken) == 120, DEADLINE_S)
        await _until_committed(app, {0: 79, 1: behind_a_hole - 1})  # 79 is the last marker
    assert await app.committed() == {0: 79, 1: 79}


@pytest.mark.slow
async def test_a_compacted_topic_is_committed_to_its_end(cleaning_kafka: str, unique_name: str) -> None:
    """Three of four offsets are gone; behind such a hole, an unfinished record is not passed over."""
    spec = TopicSpec(
        unique_name,
        1,
        {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0.01",
            "segment.ms": "100",
            "max.compaction.lag.ms": "100",
        },
    )
    await create_topics(cleaning_kafka, [spec])
    keys = [b"kept %d" % number if number % 4 == 0 else b"written again" for number in range(400)]
    await _write(cleaning_kafka, unique_name, [b"x"] * 400, keys=keys)

    async def compacted() -> bool:
        await _write(cleaning_kafka, unique_name, [b"x"], keys=[b"written again"])  # the active segment never is
        return len(await _offsets(cleaning_kafka, unique_name)) < 150

    await until(compacted, 60.0)
    offsets = await _offsets(cleaning_kafka, unique_name)
    behind_a_hole = 204
    assert 201 not in offsets
    assert behind_a_hole in offsets
    async with GuardedApp(cleaning_kafka, unique_name, holds=lambda p, offset: offset == behind_a_hole) as app:
        await until(lambda: bool(app.taken) and app.taken[-1][1] == offsets[-1], DEADLINE_S)
        await _until_committed(app, {0: 201})
    assert await app.committed() == {0: offsets[-1] + 1}


async def test_reading_begins_at_the_cursor(kafka: str, unique_name: str) -> None:
    """Not at Kafka's committed offset, and where there is no cursor at the log's first record."""
    await create_topics(kafka, [TopicSpec(unique_name, 2)])
    for partition in (0, 1):
        await _write(kafka, unique_name, [b"x"] * 6, partition)
    async with GuardedApp(kafka, unique_name) as app:
        await _until_committed(app, {0: 6, 1: 6})
    async with GuardedApp(kafka, unique_name, cursors={0: 4}) as app:
        await until(lambda: len(app.taken) == 8, DEADLINE_S)
    assert sorted(app.taken) == [(0, 4), (0, 5), *((1, offset) for offset in range(6))]
    assert app.outside == []


async def test_a_cursor_outside_the_log_reads_from_its_beginning(kafka: str, unique_name: str) -> None:
    """Below the first record (deleted) and above the last (another topic of this name): said, and nothing dropped."""
    await create_topics(kafka, [TopicSpec(unique_name, 2)])
    for partition in (0, 1):
        await _write(kafka, unique_name, [b"x"] * 6, partition)
    await _delete_before(kafka, unique_name, {0: 4})
    async with GuardedApp(kafka, unique_name, cursors={0: 2, 1: 5000}) as app:
        await until(lambda: len(app.taken) == 8, DEADLINE_S)
        await _write(kafka, unique_name, [b"new"], 1)
        await until(lambda: len(app.taken) == 9, DEADLINE_S)
    assert sorted(app.taken) == [(0, 4), (0, 5), *((1, offset) for offset in range(7))]
    assert sorted(app.outside) == [Outside(0, 2, 4, 6), Outside(1, 5000, 0, 6)]


async def test_a_log_that_goes_back_under_the_reader_is_told(kafka: str, unique_name: str) -> None:
    """As when a topic is made anew unnoticed: Faust would drop all below the last offset without a word."""
    await create_topics(kafka, [TopicSpec(unique_name, 1)])
    await _write(kafka, unique_name, [b"x"] * 6)
    async with GuardedApp(kafka, unique_name) as app:
        await until(lambda: len(app.taken) == 6, DEADLINE_S)
        assert app.back == []
        await app.reset(0)
        await until(lambda: bool(app.back), DEADLINE_S)
    assert app.back[0] == (0, 0, 6)


# ---- helpers


async def _write(
    brokers: str, topic: str, values: Sequence[bytes], partition: int = 0, keys: Sequence[bytes] | None = None
) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=brokers)
    await producer.start()
    try:
        for number, value in enumerate(values):
            await producer.send(topic, value, key=keys[number] if keys else None, partition=partition)
    finally:
        await producer.stop()


async def _write_transactions(brokers: str, topic: str, partition: int, *, transactions: int, records: int) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=brokers, transactional_id=f"{topic}-{partition}")
    await producer.start()
    try:
        for _ in range(transactions):
            async with producer.transaction():
                for _ in range(records):
                    await producer.send(topic, b"x", partition=partition)
    finally:
        await producer.stop()


async def _delete_before(brokers: str, topic: str, offsets: dict[int, int]) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=brokers)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, p): RecordsToDelete(offset) for p, offset in offsets.items()})
    finally:
        await admin.close()


async def _offsets(brokers: str, topic: str) -> list[int]:
    """Return the offsets that the topic's first partition still has."""
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers, auto_offset_reset="earliest", enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        offsets: list[int] = []
        while await consumer.position(partition) < end:
            offsets += [record.offset for record in (await consumer.getmany(timeout_ms=1000)).get(partition, [])]
        return offsets
    finally:
        await consumer.stop()


async def _until_committed(app: GuardedApp, wanted: dict[int, int]) -> None:
    async def committed() -> bool:
        return await app.committed() == wanted

    await until(committed, DEADLINE_S)
