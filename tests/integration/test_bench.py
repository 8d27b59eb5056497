"""The benchmark, tiny, on real services: every figure is there, and every answer is right."""

import json
from pathlib import Path

import pytest

from ops.bench import dynamo
from ops.bench.run import Plan, measure
from ops.bench.workload import build

OURS = {"bytes_per_holding", "ingest_blocks_per_s", "price_b64_32k_p50_ms", "price_b64_32k_per_s"}
COMPARED = {
    "find_2048_p50_ratio",
    "find_512_p50_ratio",
    "find_64_p50_ratio",
    "lookups_per_core_2048_ratio",
    "lookups_per_redis_core_2048_ratio",
    "ingest_ratio",
    "dynamo_http_32k_p50_ms",
    "dynamo_http_32k_per_s",
}


@pytest.mark.parametrize("compare", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_tiny_run_ends_in_one_line_of_figures(
    kafka: str, redis_url: str, unique_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], compare: bool
) -> None:
    """All of ours are positive; those that need Dynamo are null without it; nothing is answered wrong."""
    if compare and (not dynamo.at_hand() or dynamo.provide()):
        pytest.skip(f"ai-dynamo-runtime {dynamo.VERSION} is not installed; `make bench` does that")
    workload = build(20_000, 6, 16, model=unique_name)
    plan = Plan(merged=2, queries=8, window_s=0.05, compare=compare)
    report = await measure(workload, plan, kafka, redis_url, tmp_path)
    report.say_json()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line.pop("wrong") == 0
    assert line.keys() == OURS | COMPARED
    assert all(line[name] > 0 for name in (OURS | COMPARED if compare else OURS))
    assert all(line[name] is None for name in (() if compare else COMPARED))
