"""Which engine a server simulates."""

import pytest

from ops.cli import set_values
from ops.simulator.server import kind_of
from ops.simulator.settings import SimulatorSettings
from ops.simulator.sglang.kind import SglangKind
from ops.simulator.sglang.settings import SglangSettings
from ops.simulator.vllm import VllmKind
from schemas.errors import ConfigError


def test_settings_choose_the_engine() -> None:
    """Each kind has settings of its own, and the version is the engine's."""
    assert isinstance(kind_of(SimulatorSettings()), VllmKind)
    sglang = kind_of(set_values(["pages=40", "write_policy=write_back", "version=0.5.18"], SglangSettings))
    assert isinstance(sglang, SglangKind)
    assert (sglang.version, sglang.reset_path) == ("0.5.18", "/flush_cache")


@pytest.mark.parametrize("pair", ["blocks=40", "write_policy=sometimes", "eagle=7"])
def test_what_the_engine_does_not_have_is_refused(pair: str) -> None:
    """A setting of the other engine, or a value that is none, is named."""
    with pytest.raises(ConfigError, match="--set"):
        set_values([pair], SglangSettings)
