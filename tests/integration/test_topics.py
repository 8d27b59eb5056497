"""Topics on a real broker: made, compared, told apart from topics of the same name, and waited for."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import structlog
from aiokafka.admin import AIOKafkaAdminClient
from structlog.testing import LogCapture

from ops.embedded.processes import LOOPBACK, free_ports
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.topics import TopicSpec, topic_specs
from streams.topics import Difference, TopicReport, create_topics, missing_topics, topic_ids, wait_for_topics
from tests.support.waiting import until


async def test_missing_topics_are_created_once(kafka: str, unique_name: str) -> None:
    """The first call makes every topic as specified, the second finds nothing to make and nothing to report."""
    specs = topic_specs([unique_name], 3)[3:]  # those of the model; the others belong to the whole broker
    first = await create_topics(kafka, specs)
    second = await create_topics(kafka, specs)
    assert first == [TopicReport(spec.name, created=True) for spec in specs]
    assert second == [TopicReport(spec.name, created=False) for spec in specs]
    assert await missing_topics(kafka, [spec.name for spec in specs]) == set()


async def test_a_topic_with_other_partitions_or_settings_is_reported_and_kept(kafka: str, unique_name: str) -> None:
    """Nothing about an existing topic is changed; every difference is named with what was wanted and found."""
    made = TopicSpec(unique_name, 2, {"cleanup.policy": "delete", "retention.ms": "60000"})
    wanted = TopicSpec(unique_name, 4, {"cleanup.policy": "compact", "retention.ms": "60000", "no.such": "1"})
    await create_topics(kafka, [made])
    differences = (
        Difference("partitions", "4", "2"),
        Difference("cleanup.policy", "compact", "delete"),
        Difference("no.such", "1", "unknown to the broker"),
    )
    assert await create_topics(kafka, [wanted]) == [TopicReport(unique_name, False, differences)]
    assert await create_topics(kafka, [made]) == [TopicReport(unique_name, created=False)]


async def test_two_processes_create_the_same_topics_at_once(kafka: str, unique_name: str) -> None:
    """Each topic is made by exactly one of them, and neither fails."""
    specs = [TopicSpec(f"{unique_name}-{number}", 1) for number in range(8)]
    reports = await asyncio.gather(*(create_topics(kafka, specs) for _ in range(4)))
    assert [sum(report.created for report in column) for column in zip(*reports, strict=True)] == [1] * len(specs)


async def test_asking_for_a_topic_does_not_create_it(kafka: str, unique_name: str) -> None:
    """A missing topic stays missing, and has no id."""
    await create_topics(kafka, [TopicSpec(f"{unique_name}-there", 1)])
    names = [unique_name, f"{unique_name}-there"]
    assert await missing_topics(kafka, names) == {unique_name}
    assert (await topic_ids(kafka, names)).keys() == {f"{unique_name}-there"}
    assert await missing_topics(kafka, names) == {unique_name}
    assert await missing_topics(kafka, []) == set()


async def test_a_topic_made_anew_has_another_id(kafka: str, unique_name: str) -> None:
    """The id stays while the topic does, and differs once the topic was deleted and made again."""
    spec = TopicSpec(unique_name, 1)
    await create_topics(kafka, [spec])
    before = await topic_ids(kafka, [unique_name])
    assert await topic_ids(kafka, [unique_name]) == before
    await _delete(kafka, unique_name)
    assert await topic_ids(kafka, [unique_name]) == {}
    await create_topics(kafka, [spec])
    after = await topic_ids(kafka, [unique_name])
    assert before[unique_name] != after[unique_name]
    assert len(before[unique_name]) == len(after[unique_name]) == 22


async def test_topics_that_the_broker_refuses_are_named(kafka: str, unique_name: str) -> None:
    """A setting that no retry would mend is a `ConfigError`, with each refused topic in its message."""
    wrong = [
        TopicSpec(f"{unique_name}-a", 0),
        TopicSpec(f"{unique_name}-b", 1, {"cleanup.policy": "forget"}),
    ]
    with pytest.raises(ConfigError, match=f"{unique_name}-a.*{unique_name}-b"):
        await create_topics(kafka, wrong)
    with pytest.raises(ConfigError, match=f"{unique_name} !"):
        await missing_topics(kafka, [f"{unique_name} !"])


async def test_a_broker_that_does_not_answer_is_unavailable() -> None:
    """The error is ours and names the address."""
    (port,) = free_ports(1)
    with pytest.raises(BrokerUnavailable, match=f"{LOOPBACK}:{port}"):
        await topic_ids(f"{LOOPBACK}:{port}", ["any"])


async def test_waiting_logs_each_change_once(kafka: str, unique_name: str) -> None:
    """Many polls of two missing topics give one line, and one more when the first of them appears."""
    first, second = f"{unique_name}-1", f"{unique_name}-2"
    log, entries = _log()
    waiting = asyncio.create_task(wait_for_topics(kafka, [first, second], log, poll_s=0.01))
    try:
        await until(lambda: len(entries) == 1)
        for _ in range(5):  # each takes as long as a poll
            await missing_topics(kafka, [first])
        await create_topics(kafka, [TopicSpec(first, 1)])
        await until(lambda: len(entries) == 2)
        assert not waiting.done()
        await create_topics(kafka, [TopicSpec(second, 1)])
        await asyncio.wait_for(waiting, 10.0)
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    told = [(entry["event"], entry["topics"]) for entry in entries]
    assert told == [("stream.topic_missing", [first, second]), ("stream.topic_missing", [second])]


async def test_topics_that_exist_are_not_waited_for(kafka: str, unique_name: str) -> None:
    """Nothing is logged then."""
    await create_topics(kafka, [TopicSpec(unique_name, 1)])
    log, entries = _log()
    await wait_for_topics(kafka, [unique_name], log)
    assert entries == []


async def _delete(kafka: str, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    try:
        await admin.start()
        await admin.delete_topics([name])
    finally:
        await admin.close()

    async def gone() -> bool:
        return bool(await missing_topics(kafka, [name]))

    await until(gone)


def _log() -> tuple[Any, list[Any]]:
    """Return a logger and the list that gets its entries."""
    capture = LogCapture()
    return structlog.wrap_logger(structlog.PrintLogger(), processors=[capture]), capture.entries
