"""The demo as a user runs it: a process of its own, which leaves no other process behind however it ends."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops.embedded.processes import LOOPBACK, free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("embedded"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by their environment"),
]
DEADLINE_S = 150.0

Start = Callable[..., "Demo"]


class Demo:
    """A running `kvatlas demo`; every process that it starts, and they start, has a mark in its environment."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        # settings that begin with `test_` are left out by `load`
        self._mark = f"KVATLAS_TEST_DEMO={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._log = log
        self._output = log.open("wb")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVATLAS_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "demo", *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**inherited, "TMPDIR": str(log.parent), **environment, name: value},
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def wait_for(self, pattern: str) -> None:
        """Wait until it has printed something."""
        until_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.output):
            assert self._process.poll() is None, self.output
            assert time.monotonic() < until_s, self.output
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def exit_code(self) -> int:
        """Wait for its end, and see that nothing is left of it."""
        code = self._process.wait(DEADLINE_S)
        assert not list(self.processes())
        return code

    def processes(self) -> Iterator[int]:
        """Yield the ids of its processes."""
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self._mark.encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)
            except OSError:  # gone, or somebody else's
                continue

    def share(self, name: str) -> float:
        """Return a share of the summary."""
        found = re.search(rf"^{name} +([\d.]+)%", self.output, re.MULTILINE)
        assert found, self.output
        return float(found[1]) / 100

    def tiers(self) -> dict[str, int]:
        """Return the tokens that engines reused, by tier."""
        found = re.search(r"^by tier +(.*) tokens$", self.output, re.MULTILINE)
        assert found, self.output
        return {part.split()[0]: int(part.split()[1]) for part in found[1].split(", ")}

    def kill(self) -> None:
        """End it at once; nothing happens where it has ended."""
        self._process.kill()
        self._process.wait()
        self._output.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start demos; what is left of one at the test's end is killed."""
    demos: list[Demo] = []

    def begin(*arguments: str, **environment: str) -> Demo:
        demos.append(Demo(tmp_path / "output", *arguments, **environment))
        return demos[-1]

    yield begin
    for demo in demos:
        demo.kill()


def test_the_default_fleet_on_given_services(start: Start, kafka: str, redis_url: str) -> None:
    """Nearly all that three vLLMs reuse was predicted, and all that was predicted is there."""
    demo = start("--seconds", "8", KVATLAS_KAFKA_BROKERS=kafka, KVATLAS_REDIS_URL=redis_url)
    assert demo.exit_code() == 0, demo.output
    assert "embedded." not in demo.output, "a service was started"
    assert demo.share("reuse") > 0.03
    assert demo.share("coverage") > 0.7  # at first prompts meet that are under way together
    assert demo.share("over-credit") < 0.01
    assert list(demo.tiers()) == ["gpu"]


def test_the_mixed_fleet(start: Start) -> None:
    """vLLMs that share a store and SGLangs with a host tier, in one index; the store's blocks are predicted too."""
    demo = start("--seconds", "8", "--fleet", "mixed")
    assert demo.exit_code() == 0, demo.output
    for service in ("Kafka", "Redis"):
        assert f'"service": "{service}"' in demo.output, f"{service} was not embedded"
    assert demo.share("coverage") > 0.7
    assert demo.share("over-credit") < 0.01
    assert demo.tiers()["pool"] > 0
    spread = re.search(r"^requests +\d+ \((.*)\), \d+ predicted to the token$", demo.output, re.MULTILINE)
    assert spread, demo.output
    counts = {part.split()[0]: int(part.split()[1]) for part in spread[1].split(", ")}
    assert set(counts) == {"vllm-0", "vllm-1", "sglang-0", "sglang-1"}
    assert min(counts.values()) > 0


def test_ctrl_c_while_services_start(start: Start) -> None:
    """Kafka, which takes longest, is just starting."""
    demo = start()
    demo.wait_for("starting Kafka")
    time.sleep(1.0)
    demo.interrupt()
    assert demo.exit_code() == 130, demo.output


@pytest.mark.parametrize("moment", [r"processes more are starting", r"requests +\d+ +reuse"])
def test_ctrl_c_later(start: Start, kafka: str, redis_url: str, moment: str) -> None:
    """While engines and relays start, and while the demo runs; then what was seen so far is summed up."""
    demo = start("--fleet", "mixed", KVATLAS_KAFKA_BROKERS=kafka, KVATLAS_REDIS_URL=redis_url)
    demo.wait_for(moment)
    demo.interrupt()
    assert demo.exit_code() == 130, demo.output
    assert ("predicted to the token" in demo.output) == ("reuse" in moment), demo.output


def test_a_process_that_dies_ends_the_demo(start: Start, kafka: str, redis_url: str) -> None:
    """It is named, logs are kept, and the others are stopped."""
    demo = start(KVATLAS_KAFKA_BROKERS=kafka, KVATLAS_REDIS_URL=redis_url)
    demo.wait_for(r"requests +\d+ +reuse")
    victims = [pid for pid in demo.processes() if b"name=engine-1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert victims
    assert demo.exit_code() == 1, demo.output
    assert "kvatlas: engine-1 exited with -9" in demo.output
    kept = re.search(r"all logs: (.*)", demo.output)
    assert kept
    assert (Path(kept[1]) / "engine-1.log").exists()


@pytest.mark.parametrize("setting", ["KVATLAS_KAFKA_BROKERS", "KVATLAS_REDIS_URL"])
def test_a_service_that_refuses_is_named(start: Start, setting: str) -> None:
    """At once, in one line, and with nothing left behind."""
    (port,) = free_ports(1)
    address = f"{LOOPBACK}:{port}"
    demo = start(**{setting: f"redis://{address}/0" if "REDIS" in setting else address})
    assert demo.exit_code() == 1, demo.output
    assert re.search(rf"^kvatlas: .*{address}", demo.output, re.MULTILINE), demo.output
    assert "Traceback" not in demo.output
