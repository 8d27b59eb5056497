"""NVIDIA Dynamo's index, as Python can call it: the tree in this process, and its HTTP indexer as another one."""

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from ops.bench.clients import HttpConnection, post
from ops.bench.traffic import UNIT, tokens_of
from ops.bench.workload import Blocks, Query, Step
from ops.embedded.kafka import default_cache
from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports, listens

VERSION = "1.6.1"
_FOLDER = default_cache() / f"ai-dynamo-runtime-{VERSION}-{sys.implementation.cache_tag}"
_READY_S = 60.0
_SETTLE_S = 2.0  # until its subscriptions stand; it does not say when
_APPLIED_S = 120.0
_STOP_S = 15.0


def provide() -> str:
    """Make Dynamo importable, from a folder of its own where this environment lacks it; return why it is not, or "".

    It stays out of the environment, so that what is measured of ours is what the lock says.
    """
    if not at_hand():
        failure = _install()
        if failure:
            return failure
    if find_spec("dynamo") is None:
        sys.path.append(str(_FOLDER))
    os.environ.setdefault("DYN_LOG", "error")  # it reads that when it is imported
    try:
        importlib.import_module("dynamo.llm")
    except ImportError as error:
        return str(error)
    return ""


def at_hand() -> bool:
    """Return whether `provide` has nothing to install."""
    return find_spec("dynamo") is not None or _FOLDER.exists()


def _install() -> str:
    """Install it into its folder, all or nothing; return what pip says where it cannot."""
    sys.stderr.write(f"installing ai-dynamo-runtime {VERSION} into {_FOLDER}, once\n")
    begun = _FOLDER.with_name(f"{_FOLDER.name}.{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    command = [*pip, "--target", str(begun), f"ai-dynamo-runtime=={VERSION}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        shutil.rmtree(begun, ignore_errors=True)
        return f"pip: {done.stderr.strip()}"
    begun.rename(_FOLDER)
    return ""


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Tree:
    """`dynamo.llm.RadixTree`: synchronous calls, which one background thread serves."""

    def __init__(self) -> None:
        self._tree: Any = importlib.import_module("dynamo.llm").RadixTree()
        self._events = 0
        self.memory_bytes = 0  # by which this process grew while events were applied

    def encode(self, steps: Sequence[Step], hashes: NDArray[np.uint64]) -> list[tuple[int, bytes]]:
        """Return the events that these steps are for an index without tiers, as JSON bytes."""
        return [(step.replica, self._event(step, hashes)) for step in steps if step.moved]

    def apply(self, events: Sequence[tuple[int, bytes]]) -> float:
        """Apply events; return how many seconds that took."""
        apply = self._tree.apply_event
        before = rss_bytes()
        began_s = time.perf_counter()
        for replica, event in events:
            try:
                apply(replica, event)
            except RuntimeError:
                continue  # a removal of what it forgot behind an earlier one
        took_s = time.perf_counter() - began_s
        self.memory_bytes += rss_bytes() - before
        return took_s

    def find(self, hashes: list[int]) -> Any:
        """Return its scores: (replica, rank) -> blocks."""
        return self._tree.find_matches(hashes).scores

    def _event(self, step: Step, hashes: NDArray[np.uint64]) -> bytes:
        self._events += 1
        own: list[int] = hashes[step.blocks].tolist()
        data: dict[str, Any] = {"removed": {"block_hashes": own}}
        if step.stored:
            parent = int(hashes[step.parent]) if step.parent >= 0 else None
            blocks = [{"block_hash": block_hash, "tokens_hash": block_hash} for block_hash in own]
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        return msgspec.json.encode({"event_id": self._events, "dp_rank": 0, "data": data})


class Indexer:
    """`python -m dynamo.indexer`, fed over ZMQ as vLLM would feed it and asked with tokens, which it hashes itself."""

    def __init__(self, replicas: int, log: Path) -> None:
        self._context = zmq.Context()
        self._publishers: list[Any] = []
        endpoints: list[str] = []
        for replica in range(replicas):
            publisher = self._context.socket(zmq.PUB)
            publisher.set_hwm(0)
            endpoints.append(f"{replica}=tcp://{LOOPBACK}:{publisher.bind_to_random_port(f'tcp://{LOOPBACK}')}")
            self._publishers.append(publisher)
        (self.port,) = free_ports(1)
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), "--block-size", str(UNIT)]
        options = ["--threads", "1", "--workers", ",".join(endpoints)]
        environment = ["DYN_LOG=error", f"PYTHONPATH={_FOLDER}"]  # nothing is there where it is installed
        self._process = ChildProcess(["env", *environment, *command, *options], log)

    async def ready(self) -> None:
        """Return once it listens and has subscribed."""

        async def answers() -> bool:
            return listens(self.port)

        failure = await self._process.ready(answers, _READY_S)
        if failure is not None:
            raise RuntimeError(f"dynamo.indexer {failure}")
        await asyncio.sleep(_SETTLE_S)

    async def feed(self, steps: Sequence[Step], hashes: NDArray[np.uint64], known: Query) -> None:
        """Publish the stores; returns once the prompt `known` is found as far as its best replica has it."""
        encode = msgspec.msgpack.Encoder().encode
        names = hashes >> np.uint64(1)  # as signed integers would be read
        sequences = [0] * len(self._publishers)
        for step in steps:
            if not step.stored or not step.moved:
                continue
            parent = int(names[step.parent]) if step.parent >= 0 else None
            own, tokens = names[step.blocks].tolist(), tokens_of(step.blocks).tolist()
            batch = [time.time(), [["BlockStored", own, parent, tokens, UNIT, None]], 0]
            sequence = sequences[step.replica]
            sequences[step.replica] += 1
            self._publishers[step.replica].send_multipart([b"", sequence.to_bytes(8, "big"), encode(batch)])
        wanted = int(known.reach.max()) * UNIT
        deadline_s = time.monotonic() + _APPLIED_S
        async with HttpConnection(self.port) as connection:
            while time.monotonic() < deadline_s:
                _, answer = await connection.ask(query(known.blocks))
                scores = msgspec.json.decode(answer)["scores"]
                if max((score for ranks in scores.values() for score in ranks.values()), default=0) >= wanted:
                    await asyncio.sleep(_SETTLE_S)
                    return
                await asyncio.sleep(0.1)
        raise TimeoutError(f"dynamo.indexer has not applied its events after {_APPLIED_S} s")

    async def stop(self) -> None:
        """Stop it."""
        await self._process.stop(_STOP_S)
        self._context.destroy(linger=0)


def query(blocks: Blocks) -> bytes:
    """Return the indexer's request about a prompt of these blocks."""
    return post("/query", msgspec.json.encode({"token_ids": tokens_of(blocks).tolist(), "model_name": "default"}))
