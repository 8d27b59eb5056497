"""Which addresses a relay takes: those that a socket can connect to."""

import pytest

from relays.process import RelayConfig, profile_of, spread_ranks
from relays.sockets import check_address
from schemas.errors import ConfigError


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.7:5557", "tcp://[::1]:5557", "ipc:///run/kv", "inproc://kv_dp1"])
def test_an_address_that_can_be_connected_to_is_taken(endpoint: str) -> None:
    check_address(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    ["r0:5557", "tcp://r0", "tcp://*:5557", "tcp://:5557", "tcp://r0:0", "tcp://r0:65536", "ipc://", "udp://r0:1"],
)
def test_an_address_without_a_place_is_refused_by_name(endpoint: str) -> None:
    """An engine's own setting, with a wildcard for its host, is one of them."""
    with pytest.raises(ConfigError) as refused:
        check_address(endpoint)
    assert repr(endpoint) in str(refused.value)


@pytest.mark.parametrize("replay", ["tcp://r0:5557", "tcp://*:5657", "r0"])
def test_replays_have_an_address_of_their_own(replay: str) -> None:
    config = RelayConfig(
        model="m", replica="r0", engine="vllm", version="0.32.0", ranks=spread_ranks("tcp://r0:5557", replay, 1)
    )
    with pytest.raises(ConfigError, match=replay.replace("*", ".")):
        profile_of(config)
