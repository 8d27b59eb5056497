"""`kvatlas doctor` on a running deployment: all is well, and then the first thing that is not."""

from collections.abc import AsyncIterator

import pytest

from ops.check.doctor import Doctor
from ops.check.report import Finding, is_fit
from ops.embedded.processes import LOOPBACK, free_ports
from ops.settings import Settings
from ops.stack import Stack
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Deployment:
    """One simulated engine with a relay, a worker and a router."""

    def __init__(self, stack: Stack, model: str) -> None:
        self.stack = stack
        self.model = model
        self.http, self.events, self.replay = free_ports(3)

    def start_engine(self) -> None:
        """Start the engine."""
        ports = {"http_port": self.http, "events_port": self.events, "replay_port": self.replay}
        self.stack.start("engine", ["engine", *(f"--set={name}={port}" for name, port in ports.items())])

    def start_relay(self, *facts: str) -> None:
        """Start its relay, told these facts."""
        endpoints = ["--events", f"tcp://{LOOPBACK}:{self.events}", "--replay", f"tcp://{LOOPBACK}:{self.replay}"]
        sets = [part for fact in facts for part in ("--set", fact)]
        self.stack.start_relay(
            ["--model", self.model, "--replica", "r0", "--engine-version", "0.32.0", *endpoints, *sets]
        )

    async def findings(self, **changes: str) -> dict[str, Finding]:
        """Return what doctor finds, by step."""
        options = {"kafka_brokers": self.stack.brokers, "redis_url": self.stack.redis_url, **changes}
        doctor = Doctor(self.model, Settings(**options), self.stack.router_url)  # type: ignore[arg-type]
        return {finding.rule: finding async for finding in doctor.steps()}

    async def first_wrong(self, **changes: str) -> Finding:
        """Return the last step's finding, which must be a wrong one."""
        finding = list((await self.findings(**changes)).values())[-1]
        assert finding.verdict == "unfit", finding
        return finding


@pytest.fixture
async def deployment(kafka: str, redis_url: str, unique_name: str) -> AsyncIterator[Deployment]:
    """A deployment whose engine and relay are not started yet."""
    options = {"WORKER_GROUP": unique_name}
    async with Stack([unique_name], brokers=kafka, redis_url=redis_url, options=options) as stack:
        yield Deployment(stack, unique_name)


async def test_the_first_thing_that_is_wrong_is_named(deployment: Deployment) -> None:
    """Step by step a deployment is put together; each time doctor names what is missing next, then that all is well."""
    finding = await deployment.first_wrong()
    assert (finding.rule, "kvatlas relay" in finding.mend) == ("replicas", True)

    deployment.start_relay()

    async def registered() -> bool:
        return "replicas" in (found := await deployment.findings()) and found["replicas"].verdict == "fit"

    await until(registered, 60.0)
    finding = await deployment.first_wrong()
    assert (finding.rule, "--kv-events-config" in finding.mend) == ("engines", True)

    deployment.start_engine()

    async def well() -> bool:
        return is_fit((await deployment.findings()).values())

    await until(well, 90.0)

    finding = await deployment.first_wrong(redis_url=f"redis://{LOOPBACK}:{free_ports(1)[0]}/0")
    assert (finding.rule, finding.mend) == ("redis", "KVATLAS_REDIS_URL")
    finding = await deployment.first_wrong(kafka_brokers=f"{LOOPBACK}:{free_ports(1)[0]}")
    assert (finding.rule, finding.mend) == ("kafka", "KVATLAS_KAFKA_BROKERS")

    await deployment.stack.stop_part("worker", hard=True)

    async def index_wrong() -> bool:
        return list(await deployment.findings())[-1] == "index"

    await until(index_wrong, 60.0)
    deployment.stack.start_worker()
    await until(well, 90.0)

    await deployment.stack.stop_part("relay", hard=True)
    finding = await deployment.first_wrong()
    assert (finding.rule, "r0" in finding.text) == ("relays", True)


async def test_a_pool_that_nobody_tells_of_is_named(deployment: Deployment) -> None:
    """A replica that reads a pool without a relay is told so at the last step."""
    deployment.start_engine()
    deployment.start_relay('pools=[{"name": "mooncake"}]')

    async def pools_wrong() -> bool:
        return list(await deployment.findings())[-1] == "pools"

    await until(pools_wrong, 90.0)
    finding = await deployment.first_wrong()
    assert "r0 reads mooncake" in finding.text
