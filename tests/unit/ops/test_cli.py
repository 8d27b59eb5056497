"""Values of `--set`: JSON, or a bare word where a text is wanted."""

import pytest

from ops.cli import set_values
from relays.dialects import EngineSettings
from schemas.errors import ConfigError
from schemas.profiles import PoolUse


def test_values_are_read_as_their_setting_wants() -> None:
    facts = set_values(
        ["hash_seed=0", "block_size=32", "hicache=true", 'pools=[{"name": "p"}]', "connector=offloading"],
        EngineSettings,
    )
    assert facts == EngineSettings(
        hash_seed="0", block_size=32, hicache=True, pools=(PoolUse("p"),), connector="offloading"
    )


@pytest.mark.parametrize(
    ("pair", "said"),
    [("block_size", "NAME=VALUE"), ("block_size=x", "block_size"), ("blocksize=1", "blocksize"), ("pools=p", "pools")],
)
def test_a_mistake_is_named(pair: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        set_values([pair], EngineSettings)
