"""All settings; this module is the one reader of the environment."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from ops.kafka_client import KafkaSecurity
from schemas.errors import ConfigError

PREFIX = "KVATLAS_"

_OF_TESTS = ("captures", "cases", "test_")  # beginnings of variables that only the tests read


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by a variable `KVATLAS_<NAME IN CAPITALS>`; the defaults work on a laptop."""

    kafka_brokers: str = "localhost:9092"
    kafka_security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    kafka_username: str = ""
    kafka_password: str = ""
    kafka_ca_file: str = ""
    kafka_request_timeout_ms: int = 120_000  # an idempotent batch must outlive a broker's outage
    redis_url: str = "redis://localhost:6379/0"  # several servers: separated by commas
    redis_timeout_s: float = 5.0
    models: str = ""  # names of the models that a worker folds and a router serves, separated by commas
    shards: int = 1  # of each model; fixed for the life of its index
    partitions: int = 8  # of topics that are keyed by replica or request; never changed live
    secret: str = ""  # of the deployment, mixed into block hashes; equal in relays and routers
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # of relay and worker; 0: none

    relay_heartbeat_s: float = 1.0
    relay_probe_s: float = 15.0  # an idle source is asked for its last batch this often
    relay_idle_poll_s: float = 0.1  # between two questions to an engine that must be asked and has nothing to say
    relay_poll_timeout_s: float = 30.0  # of one answer; what a given-up answer held is lost
    relay_replay_timeout_s: float = 5.0  # without any answer to a replay request
    relay_unknown_after_s: float = 30.0  # a source that is disconnected this long is no longer believed
    relay_records_in_flight: int = 64  # unacknowledged by Kafka; more wait in the mirror as a difference
    relay_buffer_messages: int = 100_000  # live messages held while a replay is pending

    worker_group: str = "kvatlas"
    worker_take: int = 200  # records of one flush at most
    worker_take_within_s: float = 0.02
    worker_session_timeout_s: float = 10.0
    worker_stuck_after_s: float = 120.0  # records wait and none is folded: the process begins anew
    worker_sweep_s: float = 60.0

    router_host: str = "127.0.0.1"
    router_port: int = 8080
    router_refresh_s: float = 0.25  # how old the table of holders may be
    router_max_body_bytes: int = 32 << 20
    router_body_timeout_s: float = 10.0
    router_redis_timeout_s: float = 0.5
    stale_after_s: float = 5.0  # since the last heartbeat
    unknown_after_s: float = 30.0

    @property
    def security(self) -> KafkaSecurity:
        """How brokers are reached."""
        return KafkaSecurity(
            protocol=self.kafka_security,
            mechanism=self.kafka_sasl_mechanism,
            username=self.kafka_username,
            password=self.kafka_password,
            ca_file=self.kafka_ca_file,
        )


def load(environ: Mapping[str, str]) -> Settings:
    """Return the settings that the environment names.

    Raises:
        ConfigError: a variable that no setting has, or a value that does not fit; the message names it.
    """
    given = {name[len(PREFIX) :].lower(): value for name, value in environ.items() if name.startswith(PREFIX)}
    given = {name: value for name, value in given.items() if not name.startswith(_OF_TESTS)}
    try:
        return msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"environment: {_named(str(error), given)}") from error


def _named(problem: str, given: Mapping[str, str]) -> str:
    """Return msgspec's complaint with the variable and its value in it; a password is a text, so it is never wrong."""
    found = re.search(r" - at `\$\.(\w+)`| unknown field `(\w+)`", problem)
    if found is None:
        return problem
    if found[2] is not None:
        return f"{PREFIX}{found[2].upper()} is no setting"
    return f"{PREFIX}{found[1].upper()}={given[found[1]]!r}: {problem[: found.start()]}"


def listed(value: str) -> list[str]:
    """Return the parts of a comma-separated setting."""
    return [part.strip() for part in value.split(",") if part.strip()]
