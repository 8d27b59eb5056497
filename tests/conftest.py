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
from pathlib import Path

import pytest

from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.redis import EmbeddedRedis
from schemas.errors import ConfigError


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that the whole run shares: never stopped, topics by `unique_name`."""
    given = os.environ.get("KVATLAS_KAFKA_BROKERS")
    if given:
        yield given
        return
    service = EmbeddedKafka(tmp_path_factory.mktemp("kafka"))
    with _running(service):
        yield service.bootstrap


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory, redis_server: Path | None) -> Iterator[str]:
    """The URL of a server that the whole run shares: never stopped or flushed, keys by `unique_name`."""
    given = os.environ.get("KVATLAS_REDIS_URL")
    if given:
        yield given
        return
    service = EmbeddedRedis(tmp_path_factory.mktemp("redis"), executable=redis_server)
    with _running(service):
        yield service.url


@pytest.fixture(scope="session")
def redis_server() -> Path | None:
    """The Redis executable that this run tests with; None: the embedded Valkey."""
    named = os.environ.get("KVATLAS_TEST_REDIS_SERVER")
    return Path(named) if named else None


@pytest.fixture
def unique_name() -> str:
    """A name that no other test and no other run uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@contextmanager
def _running(service: EmbeddedKafka | EmbeddedRedis) -> Iterator[None]:
    try:
        asyncio.run(service.start())
    except ConfigError as error:  # its packages are not installed
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    try:
        yield
    finally:
        asyncio.run(service.stop())
