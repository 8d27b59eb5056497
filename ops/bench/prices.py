"""`POST /v1/price` of a real router process, in turn with Dynamo's HTTP indexer, both asked with tokens."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pybase64

from ops.bench.clients import HttpConnection, percentile, post, saturate
from ops.bench.dynamo import Indexer
from ops.bench.dynamo import query as indexer_query
from ops.bench.ingest import end_of, start_part
from ops.bench.traffic import UNIT, holder, tokens_of
from ops.bench.workload import Query, Workload
from ops.embedded.processes import LOOPBACK, free_ports
from ops.stack import is_ready

_READY_S = 60.0
_STOP_S = 15.0
_CONNECTIONS = 16
_WINDOWS = 9


class Served(NamedTuple):
    """One server's answers."""

    p50_s: float  # one connection
    per_s: float  # 16 connections, one process


class Prices(NamedTuple):
    """What was measured."""

    ours: Served
    dynamo: Served | None
    wrong: int  # of our answers


async def measure(
    brokers: str,
    redis_url: str,
    workload: Workload,
    asked: Sequence[Query],
    indexer: Indexer | None,
    folder: Path,
    window_s: float,
) -> Prices:
    """Return how fast prompts are priced; every answer of ours is compared with the truth first."""
    (port,) = free_ports(1)
    # the relays that wrote the records are no more, so that their silence must be believed
    options = {"ROUTER_PORT": str(port), "STALE_AFTER_S": "1e9", "UNKNOWN_AFTER_S": "1e9"}
    log = folder / "router.log"
    router = start_part("router", workload.model, brokers, redis_url, log, options)

    try:
        failure = await router.ready(partial(is_ready, f"http://{LOOPBACK}:{port}"), _READY_S)
        if failure is not None:
            raise RuntimeError(f"the router {failure}: {end_of(log)}")
        requests = [post("/v1/price", _question(workload.model, query)) for query in asked]
        wrong = 0
        async with HttpConnection(port) as connection:
            for query, request in zip(asked, requests, strict=True):
                wrong += not _right(workload, query, await connection.ask(request))
        servers = {port: requests}
        if indexer is not None:
            servers[indexer.port] = [indexer_query(query.blocks) for query in asked]
        served = await _in_turn(servers, window_s)
    finally:
        await router.stop(_STOP_S)
    return Prices(served[port], served[indexer.port] if indexer is not None else None, wrong)


async def _in_turn(servers: dict[int, list[bytes]], window_s: float) -> dict[int, Served]:
    samples: dict[int, list[float]] = {port: [] for port in servers}
    rates: dict[int, list[float]] = {port: [] for port in servers}
    connections = {port: HttpConnection(port) for port in servers}
    for connection in connections.values():
        await connection.__aenter__()
    for number in range(min(map(len, servers.values()))):
        for port, requests in servers.items():
            began_s = time.perf_counter()
            await connections[port].ask(requests[number])
            samples[port].append(time.perf_counter() - began_s)
    for connection in connections.values():
        await connection.__aexit__(None, None, None)
    for _ in range(_WINDOWS):
        for port, requests in servers.items():
            rates[port].append(await saturate(port, requests, _CONNECTIONS, window_s))
    return {port: Served(percentile(samples[port], 0.5), percentile(rates[port], 0.5)) for port in servers}


def _question(model: str, query: Query) -> bytes:
    tokens = pybase64.b64encode_as_string(tokens_of(query.blocks).tobytes())
    return msgspec.json.encode({"model": model, "tokens_b64": tokens})


def _right(workload: Workload, query: Query, answer: tuple[int, bytes]) -> bool:
    """Return whether the answer says of every replica what the workload does; the last token is never reused."""
    status, body = answer
    if status != 200:
        return False
    known = {
        (replica["replica"], replica["rank"]): replica["reusable_tokens"]
        for replica in msgspec.json.decode(body)["replicas"]
    }
    most = (len(query.blocks) - 1) * UNIT
    reach: list[int] = query.reach.tolist()
    return known == {holder(replica): min(reach[replica] * UNIT, most) for replica in range(workload.replicas)}
