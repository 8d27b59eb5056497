"""Kafka's jars: downloaded once through `jgo`, then kept in a cache folder."""

import fcntl
import shutil
from pathlib import Path

import structlog

from schemas.errors import BrokerUnavailable, ConfigError

KAFKA_VERSION = "4.3.1"
_ARTIFACTS = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",  # the version of Kafka's slf4j-api; without a binding the broker logs nothing
)
_SCOPES = ("compile", "runtime")

log = structlog.get_logger()


def kafka_jars(cache: Path) -> list[Path]:
    """Return the jars of a Kafka broker; the 46 of them (45 MB) are downloaded where the cache has none.

    Raises:
        ConfigError: the package `jgo` is not installed.
        BrokerUnavailable: the download failed; nothing of it stays.
    """
    folder = cache / f"kafka-{KAFKA_VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            if not folder.exists():
                _download(folder)
    return sorted(folder.rglob("*.jar"))


def _download(folder: Path) -> None:
    try:
        from jgo.maven import MavenContext  # an optional package
    except ImportError as error:
        raise ConfigError("embedded Kafka needs the package `jgo`: install kvatlas[embedded]") from error
    # jgo trusts any file that is there, also one whose download was cut short, so only a whole folder gets the name
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    log.info("embedded.download_started", artifacts=_ARTIFACTS, folder=str(folder))
    # the Maven layer alone: jgo's higher ones would fetch a JDK to sort the jars into modules
    context = MavenContext(repo_cache=partial, timeout=60)
    try:
        named, implied = context.resolver.resolve([context.create_dependency(name) for name in _ARTIFACTS])
        for dependency in [*named, *(one for one in implied if one.scope in _SCOPES)]:
            dependency.artifact.resolve()
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise BrokerUnavailable(f"embedded Kafka: its jars cannot be downloaded: {error}") from error
    partial.rename(folder)
    log.info("embedded.download_finished")
