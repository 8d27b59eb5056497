"""How every Kafka client of kvatlas connects: the security settings, and aiokafka's arguments made of them."""

import ssl
from typing import Any, Literal

import msgspec

from schemas.errors import ConfigError


class KafkaSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """How brokers are reached; contradictory settings raise `ConfigError`, and the password is never shown."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"  # of a SASL protocol
    username: str = ""
    password: str = ""
    ca_file: str = ""  # PEM; who may sign the brokers' certificates, empty: whom the system trusts

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot work."""
        if self.sasl and not (self.username and self.password):
            raise ConfigError(f"Kafka: {self.protocol} needs a username and a password")
        if not self.sasl and (self.username or self.password):
            raise ConfigError(f"Kafka: {self.protocol} takes no username or password")
        if not self.tls and self.ca_file:
            raise ConfigError(f"Kafka: {self.protocol} takes no CA file, got {self.ca_file!r}")

    def __repr__(self) -> str:
        """Show everything but the password."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "password"}
        return f"KafkaSecurity({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def sasl(self) -> bool:
        """Whether the broker asks who we are."""
        return self.protocol.startswith("SASL_")

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.protocol.endswith("SSL")


PLAINTEXT = KafkaSecurity()


def ssl_context(security: KafkaSecurity) -> ssl.SSLContext | None:
    """Return what verifies the brokers' certificates and host names; None without TLS.

    Raises:
        ConfigError: the CA file cannot be read or holds no certificate.
    """
    if not security.tls:
        return None
    try:
        return ssl.create_default_context(cafile=security.ca_file or None)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"Kafka: CA file {security.ca_file!r}: {error}") from error


def client_options(bootstrap: str, security: KafkaSecurity = PLAINTEXT) -> dict[str, Any]:
    """Return the arguments that any of aiokafka's clients (producer, consumer, admin) takes to connect.

    Raises:
        ConfigError: the CA file cannot be read or holds no certificate.
    """
    options: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "security_protocol": security.protocol,
        "ssl_context": ssl_context(security),
    }
    if security.sasl:
        options |= {
            "sasl_mechanism": security.mechanism,
            "sasl_plain_username": security.username,
            "sasl_plain_password": security.password,
        }
    return options
