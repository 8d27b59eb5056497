"""The conformance check against running engines: what it says of them, and that its recordings can be replayed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ops.check.live import Target, check_live
from ops.check.report import is_fit
from ops.embedded.processes import LOOPBACK, free_ports
from ops.replay.capture import load_capture
from ops.replay.recordings import replay
from ops.simulator.server import run_engine
from ops.simulator.settings import SimulatorSettings
from relays.dialects import EngineSettings
from schemas.errors import Unavailable

VERSIONS = ["0.12.0", "0.14.1", "0.22.1", "0.28.0", "0.32.0"]


@asynccontextmanager
async def engine(version: str, **changes: object) -> AsyncIterator[SimulatorSettings]:
    http, events, replays = free_ports(3)
    settings = SimulatorSettings(
        version=version,
        http_port=http,
        events_port=events,
        replay_port=replays,
        **changes,  # type: ignore[arg-type]
    )
    running = asyncio.create_task(run_engine(settings))
    try:
        yield settings
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def target(settings: SimulatorSettings, version: str, *, replay: bool = True) -> Target:
    return Target(
        engine="vllm",
        version=version,
        events=f"tcp://{LOOPBACK}:{settings.events_port}",
        replay=f"tcp://{LOOPBACK}:{settings.replay_port}" if replay else None,
        topic="",
        rank=0,
        api=f"http://{LOOPBACK}:{settings.http_port}",
        settings=EngineSettings(hash_seed=settings.hash_seed),
    )


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_engine_is_fit_as_its_own_version_and_its_recording_replays(version: str, tmp_path: Path) -> None:
    """Every probe is predicted to the token, and `kvatlas replay` of what was recorded finds the same."""
    async with engine(version, hash_seed="0") as settings:
        findings, listener = await check_live(target(settings, version), 1.0)
        assert is_fit(findings), findings
        assert {f.rule: f.verdict for f in findings}["predictions"] == "fit"
        listener.recorder.write(tmp_path / "r", "vllm", version, EngineSettings(hash_seed="0"), 0, 16)
    score = await replay(load_capture(tmp_path / "r"))
    assert score.compared >= 8
    assert score.exact == score.compared


@pytest.mark.parametrize(("runs", "given"), [("0.32.0", "0.22.1"), ("0.14.1", "0.28.0"), ("0.28.0", "0.25.1")])
async def test_an_engine_is_unfit_as_another_version(runs: str, given: str) -> None:
    """Encoding, fields or the replay's framing give the wrong version away."""
    async with engine(runs) as settings:
        findings, _ = await check_live(target(settings, given), 1.0)
        assert not is_fit(findings)


async def test_no_replay_is_noted() -> None:
    """An engine without a replay endpoint is fit, with the cost said."""
    async with engine("0.32.0") as settings:
        findings, _ = await check_live(target(settings, "0.32.0", replay=False), 1.0)
        assert is_fit(findings)
        assert {f.rule: f.verdict for f in findings}["replay"] == "note"


async def test_nobody_at_the_address_is_said() -> None:
    """An address that nobody publishes at is an error that names it."""
    (port,) = free_ports(1)
    nobody = Target(
        engine="vllm",
        version="0.32.0",
        events=f"tcp://{LOOPBACK}:{port}",
        replay=None,
        topic="",
        rank=0,
        api=None,
        settings=EngineSettings(),
    )
    with pytest.raises(Unavailable, match=str(port)):
        await check_live(nobody, 0.1)
