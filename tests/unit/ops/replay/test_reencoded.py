"""Recordings as every other version would have sent them: what the events still tell is predicted to the token."""

import pytest

from ops.check.command import findings_of
from ops.replay.capture import load_capture
from ops.replay.recordings import replay
from tests.support.captures import recording_of
from tests.support.reencoded import as_version

VLLM = [
    "0.11.0",
    "0.12.0",
    "0.13.0",
    "0.14.1",
    "0.16.0",
    "0.17.1",
    "0.18.1",
    "0.19.1",
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
]
SGLANG = [
    "0.5.6",
    "0.5.8",
    "0.5.9",
    "0.5.10",
    "0.5.11",
    "0.5.15",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
]

# hashes of salts and adapters are made otherwise from 0.17 and 0.31 on, and are not made anew here
CASES = [
    *(
        ("vllm", "0.32.0-mm-llava", version, 10 if index > VLLM.index("0.18.1") else 1)
        for index, version in enumerate(VLLM)
    ),
    *(("vllm", "0.14.1-salt-lora", version, 10) for version in VLLM[: VLLM.index("0.17.1")]),
    *(("sglang", "0.5.23-hicache-write-back-p16", version, 90) for version in ("0.5.8", "0.5.10", "0.5.11", "0.5.19")),
    *(("sglang", "0.5.18-repeat-split", version, 4) for version in SGLANG),
    *(("sglang", "0.5.23-namespaces-default", version, 3) for version in SGLANG[: SGLANG.index("0.5.18")]),
    *(("sglang", "0.5.23-namespaces-default", version, 9) for version in SGLANG[SGLANG.index("0.5.18") : -1]),
]


@pytest.mark.parametrize(("engine", "name", "version", "compared"), CASES)
async def test_a_recording_is_read_in_every_versions_form(engine: str, name: str, version: str, compared: int) -> None:
    """What that version tells is exact, what it hides is left out by its name, and its messages fit its rules."""
    capture = as_version(load_capture(recording_of(engine, name)), version)
    score = await replay(capture)
    assert (score.exact, score.states_equal, score.host_states_equal) == (compared, score.states, score.host_states)
    assert score.compared == compared
    assert set(score.excluded) <= {"namespace_not_in_events"}
    findings = await findings_of(capture)
    assert [finding for finding in findings if finding.verdict == "unfit"] == []
