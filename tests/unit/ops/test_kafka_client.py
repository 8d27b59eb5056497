"""Security settings of Kafka clients: what is refused, what is passed on, what is never shown."""

import ssl
from pathlib import Path

import msgspec
import pytest

from ops.kafka_client import PLAINTEXT, KafkaSecurity, client_options
from schemas.errors import ConfigError


def test_the_default_connects_in_the_clear() -> None:
    """Nothing about passwords or certificates is passed then."""
    assert client_options("broker:9092") == {
        "bootstrap_servers": "broker:9092",
        "security_protocol": "PLAINTEXT",
        "ssl_context": None,
    }
    assert not PLAINTEXT.sasl
    assert not PLAINTEXT.tls


def test_a_password_is_passed_on_and_not_shown() -> None:
    """aiokafka gets it, `repr` does not."""
    security = KafkaSecurity(
        protocol="SASL_PLAINTEXT", mechanism="SCRAM-SHA-512", username="relay", password="correct horse"
    )
    options = client_options("broker:9092", security)
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("relay", "correct horse")
    assert "relay" in repr(security)
    assert "correct horse" not in repr(security)


def test_tls_verifies_certificates_and_host_names() -> None:
    """There is no way to switch either off."""
    context = client_options("broker:9092", KafkaSecurity(protocol="SSL"))["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "SASL_SSL"}, "SASL_SSL needs a username and a password"),
        ({"protocol": "SASL_PLAINTEXT", "username": "relay"}, "needs a username and a password"),
        ({"username": "relay", "password": "secret"}, "PLAINTEXT takes no username or password"),
        ({"protocol": "SSL", "username": "relay"}, "SSL takes no username or password"),
        ({"ca_file": "ca.pem"}, "PLAINTEXT takes no CA file, got 'ca.pem'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], message: str) -> None:
    """Also when they are read from a file or the environment."""
    with pytest.raises(ConfigError, match=message):
        msgspec.convert(settings, KafkaSecurity)


def test_a_ca_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A missing one and one without a certificate, when the options are made."""
    with pytest.raises(ConfigError, match="no-such-ca"):
        client_options("broker:9092", KafkaSecurity(protocol="SSL", ca_file=str(tmp_path / "no-such-ca.pem")))
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(ConfigError, match=r"empty\.pem"):
        client_options("broker:9092", KafkaSecurity(protocol="SSL", ca_file=str(empty)))
