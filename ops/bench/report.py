"""What a run says: tables for people, and one JSON object on the last line for programs."""

import os
import sys

import msgspec

from ops.bench.ingest import Ingested
from ops.bench.lookup import PARTS, Lookups
from ops.bench.prices import Prices


def say_load() -> None:
    """Print how busy the machine is; every ratio is of calls in turn, but absolute figures follow this one."""
    say(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Report(msgspec.Struct, kw_only=True):
    """All figures of a run; ratios are ours over Dynamo's, None where Dynamo was not there."""

    ingested: Ingested
    bytes_per_holding: float
    dynamo_bytes_per_holding: float | None
    lookups: Lookups
    prices: Prices | None = None

    def say_lookups(self) -> None:
        """Print ingest, memory and lookups."""
        ingested, load = self.ingested, self.lookups.load
        say(f"ingest: {ingested.blocks_per_s:,.0f} blocks/s from Kafka to Redis with one worker")
        if ingested.dynamo_blocks_per_s is not None:
            say(f"  Dynamo {ingested.dynamo_blocks_per_s:,.0f} blocks/s in process: {ingested.ratio:.2f}x")
        say(f"memory: {self.bytes_per_holding:.1f} bytes a (block, replica)")
        if self.dynamo_bytes_per_holding is not None:
            say(f"  Dynamo {self.dynamo_bytes_per_holding:.1f}")
        say(f"wrong answers: {self.lookups.wrong} of {self.lookups.checked}, every replica and tier compared")
        if load.dynamo is not None:
            say(f"  Dynamo {self.lookups.dynamo_wrong}, which knows of no tiers")
        for name, share in (("median", 0.5), ("fastest tenth below", 0.1)):
            say(f"one lookup, us, {name}:")
            parts = [part for part in PARTS if self.lookups.latencies[0].samples[part]]
            say("  blocks " + "".join(f"{part:>10}" for part in parts) + "     ratio")
            for latencies in self.lookups.latencies:
                figures = "".join(f"{latencies.us(part, share):>10.1f}" for part in parts)
                ratio = latencies.ratio(share)
                say(f"{latencies.length:>8} {figures}" + (f"{ratio:>10.2f}" if ratio is not None else "         -"))
        say(
            f"2048 blocks, 32 at once: {load.ours.per_s:,.0f}/s; CPU us a lookup: {load.ours.us:.1f}, of that in Redis "
            f"{load.ours.server_us:.1f}"
        )
        if load.dynamo is not None:
            say(
                f"  Dynamo {load.dynamo.per_s:,.0f}/s, {load.dynamo.us:.1f} us: {load.ratio:.2f}x a core, "
                f"{load.ratio_of_server:.2f}x a core of Redis"
            )

    def say_prices(self) -> None:
        """Print what pricing over HTTP takes."""
        if self.prices is None:
            return
        for name, served in (("router", self.prices.ours), ("dynamo.indexer", self.prices.dynamo)):
            if served is not None:
                say(
                    f"32,768 tokens over HTTP, {name}: p50 {served.p50_s * 1e3:.2f} ms, {served.per_s:,.0f}/s a process"
                )

    def line(self) -> dict[str, float | None]:
        """Return the figures that programs read."""
        by_length = {latencies.length: latencies for latencies in self.lookups.latencies}
        wrong = self.lookups.wrong
        figures: dict[str, float | None] = {
            f"find_{length}_p50_ratio": _rounded(by_length[length].ratio(), 3) for length in (2048, 512, 64)
        } | {
            "lookups_per_core_2048_ratio": _rounded(self.lookups.load.ratio, 3),
            "lookups_per_redis_core_2048_ratio": _rounded(self.lookups.load.ratio_of_server, 3),
            "bytes_per_holding": round(self.bytes_per_holding, 2),
            "ingest_ratio": _rounded(self.ingested.ratio, 3),
            "ingest_blocks_per_s": round(self.ingested.blocks_per_s),
        }
        if self.prices is not None:
            wrong += self.prices.wrong
            for name, served in (("price_b64", self.prices.ours), ("dynamo_http", self.prices.dynamo)):
                figures[f"{name}_32k_p50_ms"] = None if served is None else round(served.p50_s * 1e3, 3)
                figures[f"{name}_32k_per_s"] = None if served is None else round(served.per_s, 1)
        return figures | {"wrong": wrong}

    def say_json(self) -> None:
        """Print the last line."""
        say(msgspec.json.encode(self.line()).decode())


def _rounded(figure: float | None, digits: int) -> float | None:
    return None if figure is None else round(figure, digits)
