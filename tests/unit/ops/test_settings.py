"""Settings come from the environment alone, and what names them elsewhere names fields that exist."""

import re
from pathlib import Path

import pytest

from ops.settings import PREFIX, Settings, listed, load
from schemas.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_variables_become_settings() -> None:
    settings = load({"KVATLAS_MODELS": "a, b", "KVATLAS_SHARDS": "4", "KVATLAS_STALE_AFTER_S": "2.5", "HOME": "/"})
    assert (listed(settings.models), settings.shards, settings.stale_after_s) == (["a", "b"], 4, 2.5)


def test_the_variables_of_the_tests_are_nobodys_mistake() -> None:
    """Services that a test starts inherit where recordings and cases are."""
    assert load({"KVATLAS_CAPTURES": "x", "KVATLAS_CASES": "y", "KVATLAS_TEST_REDIS_SERVER": "z"}) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVATLAS_SHARD", "4", "KVATLAS_SHARD is no setting"),
        ("KVATLAS_SHARDS", "four", "KVATLAS_SHARDS='four': Expected `int`"),
        ("KVATLAS_LOG_LEVEL", "loud", "KVATLAS_LOG_LEVEL='loud': "),
    ],
)
def test_a_mistake_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load({name: value})


@pytest.mark.parametrize("file", ["docker-compose.yml", "Dockerfile", "README.md", "CONTRIBUTING.md", "ops/README.md"])
def test_variables_in_files_are_settings(file: str) -> None:
    named = set(re.findall(PREFIX + "([A-Z_]+[A-Z])", (ROOT / file).read_text()))
    strange = {name.lower() for name in named} - set(Settings.__struct_fields__)
    assert {name for name in strange if not name.startswith(("captures", "cases", "test_"))} == set()
