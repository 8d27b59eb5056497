"""Topics of the broker: which exist, with what settings and under which id; made where they are missing."""

import asyncio
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import msgspec
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidConfigurationError,
    InvalidPartitionsError,
    InvalidTopicError,
    KafkaError,
    NoError,
    PolicyViolationError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from ops.kafka_client import PLAINTEXT, KafkaSecurity, client_options
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.topics import TopicSpec
from streams.metadata import TopicsRequest

_REQUEST_TIMEOUT_MS = 10_000
_LEADERS_TIMEOUT_S = 30.0
_BROKERS_DEFAULT = -1  # as replication factor: what the brokers' default.replication.factor says
_POLL_S = 0.05
_REFUSALS = (  # of a new topic, which trying again would not change
    InvalidTopicError,
    InvalidPartitionsError,
    InvalidConfigurationError,
    PolicyViolationError,
    TopicAuthorizationFailedError,
    ClusterAuthorizationFailedError,
)


class Difference(NamedTuple):
    """A setting of an existing topic that is not as wanted; `partitions` is one of them."""

    setting: str
    wanted: str
    found: str


class TopicReport(msgspec.Struct, frozen=True):
    """What `create_topics` found or did."""

    name: str
    created: bool
    differences: tuple[Difference, ...] = ()  # of a topic that existed


async def create_topics(
    bootstrap: str, specs: Sequence[TopicSpec], security: KafkaSecurity = PLAINTEXT
) -> list[TopicReport]:
    """Create the topics that are missing, with the brokers' default replication; then all of those have leaders.

    Returns:
        One report per spec, in order. A topic that existed is left as it is: new partitions would move its keys.
    Raises:
        ConfigError: the broker refuses topics and would again; the message names them. Others may have been made.
        BrokerUnavailable: the broker does not answer, or the new topics have no leaders within 30 s.
    """
    names = [spec.name for spec in specs]
    async with _client(bootstrap, security) as client:
        there = await _described(client, names)
        created = await _create(client, [spec for spec in specs if spec.name not in there])
        there = await _described_with_leaders(client, names)
        settings = await _settings(client, [spec for spec in specs if spec.name not in created])
    return [
        TopicReport(spec.name, created=True)
        if spec.name in created
        else TopicReport(spec.name, False, tuple(_differences(spec, there[spec.name].partitions, settings[spec.name])))
        for spec in specs
    ]


async def missing_topics(bootstrap: str, names: Iterable[str], security: KafkaSecurity = PLAINTEXT) -> set[str]:
    """Return which of these topics do not exist; asking never creates one.

    Raises:
        BrokerUnavailable: the broker does not answer, or does not let us see a topic.
        ConfigError: a name that no topic can have.
    """
    wanted = set(names)
    async with _client(bootstrap, security) as client:
        return wanted - (await _described(client, wanted)).keys()


async def topic_ids(bootstrap: str, names: Iterable[str], security: KafkaSecurity = PLAINTEXT) -> dict[str, str]:
    """Return name -> Kafka's id of the topic, 22 characters of base64; a topic made anew has another, a missing none.

    Raises:
        BrokerUnavailable: the broker does not answer, or does not let us see a topic.
        ConfigError: a name that no topic can have.
    """
    async with _client(bootstrap, security) as client:
        return {name: topic.topic_id for name, topic in (await _described(client, names)).items()}


async def wait_for_topics(
    bootstrap: str, names: Iterable[str], log: Any, security: KafkaSecurity = PLAINTEXT, *, poll_s: float = 1.0
) -> None:
    """Return once all these topics exist, however long that takes.

    A broker that is away is waited for too. Each change of what is missing is logged once, as `stream.topic_missing`
    with all that is missing then, or as `stream.broker_unavailable`.

    Raises:
        ConfigError: a name that no topic can have, or a CA file that cannot be read.
    """
    wanted = set(names)
    told: object = None
    while True:
        try:
            missing = await missing_topics(bootstrap, wanted, security)
        except BrokerUnavailable as error:
            if told != str(error):
                log.warning("stream.broker_unavailable", error=str(error))
            told = str(error)
        else:
            if not missing:
                return
            if told != missing:
                log.warning("stream.topic_missing", topics=sorted(missing))
            told = missing
        await asyncio.sleep(poll_s)


# ---- making and comparing; not through aiokafka's admin client, which cannot ask for ids, and on a cluster that has no
# controller yet fails with an AttributeError


async def _create(client: AIOKafkaClient, specs: Sequence[TopicSpec]) -> set[str]:
    """Return which of these this call made: without those that another process made at the same time."""
    if not specs:
        return set()
    controller = client.cluster.controller
    if controller is None:
        raise BrokerUnavailable("Kafka has no controller at the moment")
    wanted: list[Any] = [
        (spec.name, spec.partitions, _BROKERS_DEFAULT, [], list(spec.config.items())) for spec in specs
    ]
    request = CreateTopicsRequest(wanted, timeout=_REQUEST_TIMEOUT_MS, validate_only=False)
    response = await client.send(controller.nodeId, request)
    created: set[str] = set()
    refused: list[str] = []
    for name, code, message in response.topic_errors:
        error = for_code(code)
        if error is NoError:
            created.add(name)
        elif issubclass(error, _REFUSALS):
            refused.append(f"{name!r}: {error.__name__}: {message}")
        elif error is not TopicAlreadyExistsError:
            raise BrokerUnavailable(f"topic {name!r} cannot be created now: {error.__name__}: {message}")
    if refused:
        raise ConfigError(f"Kafka refuses topics: {'; '.join(refused)}")
    return created


async def _settings(client: AIOKafkaClient, specs: Sequence[TopicSpec]) -> dict[str, dict[str, str]]:
    """Return topic -> setting -> value in force, for the settings that a spec names and the broker knows."""
    if not specs:
        return {}
    wanted = [(ConfigResourceType.TOPIC, spec.name, list(spec.config)) for spec in specs]
    response = await client.send(client.get_random_node(), DescribeConfigsRequest(wanted))
    settings: dict[str, dict[str, str]] = {}
    for code, message, _, name, entries in response.resources:
        if code:
            raise BrokerUnavailable(f"topic {name!r}: its settings: {for_code(code).__name__}: {message}")
        settings[name] = {setting: value for setting, value, *_ in entries}
    return settings


def _differences(spec: TopicSpec, partitions: int, settings: dict[str, str]) -> Iterator[Difference]:
    if partitions != spec.partitions:
        yield Difference("partitions", str(spec.partitions), str(partitions))
    for setting, wanted in spec.config.items():
        found = settings.get(setting, "unknown to the broker")
        if found != wanted:
            yield Difference(setting, wanted, found)


# ---- asking


class _Topic(NamedTuple):
    topic_id: str
    partitions: int
    led: bool  # every partition has a leader


async def _described(client: AIOKafkaClient, names: Iterable[str]) -> dict[str, _Topic]:
    """Return those of these topics that exist."""
    response = await client.send(client.get_random_node(), TopicsRequest(names))
    topics: dict[str, _Topic] = {}
    for code, name, raw_id, _, partitions, _, _ in response.topics:
        error = for_code(code)
        if error is NoError:
            topic_id = urlsafe_b64encode(raw_id).rstrip(b"=").decode()
            topics[name] = _Topic(topic_id, len(partitions), all(leader >= 0 for _, _, leader, *_ in partitions))
        elif error is InvalidTopicError:
            raise ConfigError(f"topic {name!r}: Kafka does not take this name")
        elif error is not UnknownTopicOrPartitionError:
            raise BrokerUnavailable(f"topic {name!r}: {error.__name__}")
    return topics


async def _described_with_leaders(client: AIOKafkaClient, names: Sequence[str]) -> dict[str, _Topic]:
    deadline_s = time.monotonic() + _LEADERS_TIMEOUT_S
    while True:
        topics = await _described(client, names)
        waiting = [name for name in names if name not in topics or not topics[name].led]
        if not waiting:
            return topics
        if time.monotonic() > deadline_s:
            raise BrokerUnavailable(f"topics without leaders after {_LEADERS_TIMEOUT_S:g} s: {', '.join(waiting)}")
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _client(bootstrap: str, security: KafkaSecurity) -> AsyncIterator[AIOKafkaClient]:
    client = AIOKafkaClient(**client_options(bootstrap, security), request_timeout_ms=_REQUEST_TIMEOUT_MS)
    with _translated(bootstrap):
        try:
            await client.bootstrap()
            yield client
        finally:
            await client.close()


@contextmanager
def _translated(bootstrap: str) -> Iterator[None]:
    """Raise the library's errors as ours."""
    try:
        yield
    except NotImplementedError as error:  # aiokafka's word for a version that the broker does not speak
        raise ConfigError(f"Kafka at {bootstrap}: 3.0 or later is needed: {error}") from error
    except (KafkaError, OSError) as error:
        raise BrokerUnavailable(f"Kafka at {bootstrap}: {error!r}") from error
