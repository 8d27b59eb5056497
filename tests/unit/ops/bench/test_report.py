"""The benchmark's arithmetic: percentiles, ratios, and the line for programs."""

import pytest

from ops.bench.clients import percentile
from ops.bench.ingest import Ingested
from ops.bench.lookup import PARTS, Latencies, Load, Lookups, Use
from ops.bench.prices import Prices, Served
from ops.bench.report import Report


def latencies(length: int, find_us: float, dynamo_us: float | None) -> Latencies:
    """Three calls of each part around those medians."""
    samples = {part: [find_us / 1e6 * factor for factor in (3.0, 1.0, 0.5)] for part in PARTS}
    samples["dynamo"] = [dynamo_us / 1e6 * factor for factor in (0.5, 9.0, 1.0)] if dynamo_us is not None else []
    return Latencies(length, samples)


def report(*, compared: bool) -> Report:
    """A run in which 1000 holdings were ingested in 2 s, by Dynamo in 1 s."""
    return Report(
        ingested=Ingested(1000, 2.0, 1.0 if compared else None),
        bytes_per_holding=5.126,
        dynamo_bytes_per_holding=63.0 if compared else None,
        lookups=Lookups(
            [latencies(length, 120.0, 80.0 if compared else None) for length in (64, 512, 2048)],
            Load(Use(1000, 0.5, 0.06, 0.04), Use(500, 0.5, 0.075) if compared else None),
            wrong=2,
            dynamo_wrong=0,
            checked=24,
        ),
        prices=Prices(Served(0.002, 700.0), Served(0.0025, 900.0) if compared else None, wrong=1),
    )


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.9, 5.0), (1.0, 5.0)])
def test_percentiles_are_samples_in_order(share: float, expected: float) -> None:
    """The nearest rank, whatever order they came in."""
    assert percentile([4.0, 1.0, 5.0, 2.0, 3.0], share) == expected


def test_ratios_are_ours_over_dynamos() -> None:
    """Latencies as multiples; rates as parts; lookups a core by all CPU that was used, wherever."""
    assert report(compared=True).line() == {
        "find_2048_p50_ratio": 1.5,
        "find_512_p50_ratio": 1.5,
        "find_64_p50_ratio": 1.5,
        "lookups_per_core_2048_ratio": 1.5,  # 150 us of Dynamo's, 60 of the client and 40 of Redis
        "lookups_per_redis_core_2048_ratio": 3.75,
        "bytes_per_holding": 5.13,
        "ingest_ratio": 0.5,
        "ingest_blocks_per_s": 500,
        "price_b64_32k_p50_ms": 2.0,
        "price_b64_32k_per_s": 700.0,
        "dynamo_http_32k_p50_ms": 2.5,
        "dynamo_http_32k_per_s": 900.0,
        "wrong": 3,
    }


def test_without_dynamo_its_figures_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours stay, under the same names, and the tables are printed without it."""
    alone, compared = report(compared=False), report(compared=True)
    ours = {"bytes_per_holding", "ingest_blocks_per_s", "price_b64_32k_p50_ms", "price_b64_32k_per_s", "wrong"}
    line = alone.line()
    assert {name for name, figure in line.items() if figure is not None} == ours
    assert {name: line[name] for name in ours} == {name: compared.line()[name] for name in ours}
    assert line.keys() == compared.line().keys()
    alone.say_lookups()
    alone.say_prices()
    assert "dynamo" not in capsys.readouterr().out.lower()
