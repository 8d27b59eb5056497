"""What READMEs list is what there is: settings, metrics, commands, files, facts that a relay can be told."""

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.metrics import MetricWrapperBase

from ops import cli, metrics
from ops.settings import Settings
from relays.dialects import EngineSettings, PoolSettings

ROOT = Path(__file__).parents[3]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_setting_is_listed_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`(.*)`)? ?\| ", text("ops/README.md").partition("## Metrics")[0], re.MULTILINE
    )
    fields = msgspec.structs.fields(Settings)
    assert rows == [(field.name, str(field.default)) for field in fields]


def test_every_series_is_listed_with_its_labels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]*?) ?\| ", text("ops/README.md").partition("## Metrics")[2], re.MULTILINE)
    series = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    names = [f"{one._name}_total" if one._type == "counter" else one._name for one in series]
    assert rows == list(zip(names, [" ".join(one._labelnames) for one in series], strict=True))


@pytest.mark.parametrize(
    ("heading", "kind"), [("## Running one\n", EngineSettings), ("## Running one beside", PoolSettings)]
)
def test_every_fact_that_a_relay_can_be_told_is_listed(heading: str, kind: type[msgspec.Struct]) -> None:
    section = text("relays/README.md").partition(heading)[2].partition("\n## ")[0]
    table = " ".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| "))
    assert [field.name for field in msgspec.structs.fields(kind) if not re.search(rf"\b{field.name}\b", table)] == []


def test_every_command_is_listed() -> None:
    commands = set(re.findall(r'add_parser\("([\w-]+)"', Path(cli.__file__).read_text()))
    rows = "\n".join(line for line in text("ops/README.md").splitlines() if line.startswith("| `kvatlas "))
    assert {command for command in commands if not re.search(rf"[` ]{command}[` ]", rows)} == set()


@pytest.mark.parametrize(
    "folder",
    [
        *("schemas", "relays", "streams", "index", "router", "ops"),
        *("ops/bench", "ops/demo", "ops/simulator", "tests/cases", "tests/live"),
    ],
)
def test_every_module_is_listed_in_its_folder(folder: str) -> None:
    listed = text(f"{folder}/README.md")
    modules = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert {module for module in modules if not re.search(rf"[`/ ]{re.escape(module)}`", listed)} == set()


@pytest.mark.parametrize("readme", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/README.md")))
def test_modules_that_a_readme_lists_exist(readme: str) -> None:
    """In a table's first column, beside the README or under a folder of its own."""
    folder = (ROOT / readme).parent
    cells = [line.split(" | ")[0] for line in text(readme).splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`([\w/]+\.(?:py|lua|proto|gz|jsonl))`", " ".join(cells)))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in found)} == set()
