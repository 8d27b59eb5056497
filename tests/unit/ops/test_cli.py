"""Values of `--set`: JSON, or a bare word where a text is wanted; mistakes and interruptions of commands."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cli import set_values
from relays.dialects import EngineSettings
from schemas.errors import ConfigError
from schemas.profiles import PoolUse

ROOT = Path(__file__).parents[3]


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


def kvatlas(*arguments: str, **settings: str) -> "subprocess.Popen[str]":
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")} | settings
    command = [sys.executable, "-m", "ops.cli", *arguments]
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=True
    )


RELAY = ("relay", "--model", "m", "--replica", "r", "--engine-version", "0.32.0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*RELAY, "--events", "10.0.0.7:5557"), "'10.0.0.7:5557' is no ZMQ address"),
        ((*RELAY, "--events", "tcp://r0:5557", "--ranks", "0"), "--ranks 0"),
        ((*RELAY, "--events", "tcp://r0:5557", "--replica", ""), "replica: ''"),
        ((*RELAY, "--events", "tcp://r0:5557", "--model", "a\nb"), "model: 'a"),
        ((*RELAY, "--events", "tcp://r0:5557", "--set", "block_size=-4"), "$.block_size"),
        (
            (
                "pool",
                "--kind",
                "lmcache",
                "--name",
                "x" * 2000,
                "--model",
                "m",
                "--events",
                "grpc://a:1",
                "--set=block_size=16",
            ),
            "is no name",
        ),
        (
            (
                "pool",
                "--kind",
                "mooncake",
                "--name",
                "p",
                "--model",
                "m",
                "--events",
                "tcp://*:1",
                "--set=block_size=16",
            ),
            "*:1",
        ),
        (("replay", "nowhere"), "nowhere/meta.json"),
        (
            ("check-engine", "--engine=trtllm", "--engine-version=1.2", "--events=http://r0:8000"),
            "'trtllm' cannot be checked",
        ),
    ],
)
def test_a_command_that_cannot_run_says_what_is_wrong_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    """Nothing is started, and no traceback is shown."""
    out, err = kvatlas(*arguments).communicate(timeout=60)
    (line,) = [line for line in (out + err).splitlines() if said in line]
    assert "Traceback" not in out + err, line


@pytest.mark.parametrize(
    ("command", "host", "port"),
    [
        ("router", "KVATLAS_ROUTER_HOST", "KVATLAS_ROUTER_PORT"),
        ("worker", "KVATLAS_METRICS_HOST", "KVATLAS_METRICS_PORT"),
    ],
)
def test_a_port_that_is_taken_is_named_with_its_setting(command: str, host: str, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        process = kvatlas(command, **{host: "127.0.0.1", port: number, "KVATLAS_MODELS": "m"})
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"kvatlas: {host}, {port}: 127.0.0.1:{number}: ")
    assert err.count("\n") == 1


def test_an_interrupted_replay_ends() -> None:
    """Between two recordings a replay hears that it is no longer wanted."""
    recordings = sorted(str(folder) for folder in (ROOT / "tests/data/vllm").iterdir() if folder.is_dir())
    process = kvatlas("replay", "--json", *recordings * 100)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
