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
    """All figures of a run; ratios are ours over Dynamo's."""

    ingested: Ingested
    bytes_per_holding: float
    dynamo_bytes_per_holding: float
    lookups: Lookups
    prices: Prices | None = None

    def say_lookups(self) -> None:
        """Print ingest, memory and lookups."""
        ingested, load = self.ingested, self.lookups.load
        say(
            f"ingest: {ingested.blocks_per_s:,.0f} blocks/s from Kafka to Redis with one worker, "
            f"Dynamo {ingested.blocks / ingested.dynamo_seconds:,.0f} in process: {ingested.ratio:.2f}x"
        )
        say(
            f"memory: {self.bytes_per_holding:.1f} bytes a (block, replica), Dynamo {self.dynamo_bytes_per_holding:.1f}"
        )
        say(f"wrong answers: {self.lookups.wrong} of {self.lookups.checked}, every replica and tier compared")
        for name, share in (("median", 0.5), ("fastest tenth below", 0.1)):
            say(f"one lookup, us, {name}:")
            say("  blocks " + "".join(f"{part:>10}" for part in PARTS) + "     ratio")
            for latencies in self.lookups.latencies:
                figures = "".join(f"{latencies.us(part, share):>10.1f}" for part in PARTS)
                say(f"{latencies.length:>8} {figures}{latencies.ratio(share):>10.2f}")
        say(
            f"2048 blocks, 32 at once: {load.per_s:,.0f}/s; CPU us a lookup: server {load.server_us:.1f}, "
            f"client {load.client_us:.1f}, Dynamo {load.dynamo_us:.1f} ({load.dynamo_per_s:,.0f}/s); per core "
            f"{load.ratio:.2f}x Dynamo, per core of Redis {load.ratio_of_server:.2f}x"
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

    def say_json(self) -> None:
        """Print the last line."""
        by_length = {latencies.length: latencies for latencies in self.lookups.latencies}
        wrong = self.lookups.wrong
        line = {f"find_{length}_p50_ratio": round(by_length[length].ratio(), 3) for length in (2048, 512, 64)} | {
            "lookups_per_core_2048_ratio": round(self.lookups.load.ratio, 3),
            "lookups_per_redis_core_2048_ratio": round(self.lookups.load.ratio_of_server, 3),
            "bytes_per_holding": round(self.bytes_per_holding, 2),
            "ingest_ratio": round(self.ingested.ratio, 3),
            "ingest_blocks_per_s": round(self.ingested.blocks_per_s),
        }
        if self.prices is not None:
            wrong += self.prices.wrong
            line["price_b64_32k_p50_ms"] = round(self.prices.ours.p50_s * 1e3, 3)
            line["price_b64_32k_per_s"] = round(self.prices.ours.per_s, 1)
            if self.prices.dynamo is not None:
                line["dynamo_http_32k_p50_ms"] = round(self.prices.dynamo.p50_s * 1e3, 3)
                line["dynamo_http_32k_per_s"] = round(self.prices.dynamo.per_s, 1)
        say(msgspec.json.encode(line | {"wrong": wrong}).decode())
