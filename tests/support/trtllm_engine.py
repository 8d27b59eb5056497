"""A TensorRT-LLM server as its clients see it: a tree of cached blocks, and an endpoint that empties its event buffer.

The tree follows the V1 manager since UnifiedBlockTree: what goes takes all that is below along and is named alone.
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from ops.embedded.processes import LOOPBACK, free_ports
from relays.trtllm_hashes import v1_names
from schemas.profiles import Tier
from tests.support.engines import chain
from tests.support.trtllm_events import SIZE, block, created, event, moved, removed, stored

Fault = Literal["refused", "lost", "cut", "garbage"]
"""What becomes of one poll: an error before the buffer is emptied, or no, half, or a nonsense answer after it was."""

_TIERS: tuple[Tier, ...] = ("gpu", "host")


class Cached:
    """One block of the tree."""

    def __init__(self, name: int, tokens: tuple[int, ...], path: tuple[int, ...], parent: "Cached | None") -> None:
        self.name = name
        self.tokens = tokens
        self.path = path  # the prompt up to its end
        self.parent = parent
        self.below: dict[tuple[int, ...], Cached] = {}
        self.level = 0


class TreeEngine:
    """One rank's cache, which says what it does; blocks of four tokens, the last of a prompt perhaps partial."""

    def __init__(
        self, seed: int = 0, *, rank: int | None = None, windows: tuple[int, ...] = (4096,), cascade: bool = True
    ) -> None:
        self.events: list[dict[str, Any]] = []  # not yet asked for
        self.next = 0
        self._rng = random.Random(seed)
        self._rank = {} if rank is None else {"attention_dp_rank": rank}
        self._windows = windows
        self._cascade = cascade
        self._first: dict[tuple[int, ...], Cached] = {}
        for window in windows:
            self._say(created(), window)

    def act(self) -> None:
        """Do something: mostly store a prompt, now and then move or drop a block."""
        choice = self._rng.random()
        held = list(self._walk())
        if choice < 0.2 and held:
            self._drop(self._rng.choice(held))
        elif choice < 0.45 and held:
            self._move(self._rng.choice(held))
        else:
            self._store([self._rng.randrange(2) for _ in range(self._rng.randint(1, 5 * SIZE))])

    def resident(self, model: str) -> dict[int, Tier]:
        """Return our hash and the tier of every whole block that is cached."""
        whole = [cached for cached in self._walk() if len(cached.tokens) == SIZE]
        return {chain(cached.path, model=model)[-1]: _TIERS[cached.level] for cached in whole}

    def drain(self) -> list[dict[str, Any]]:
        """Return the events that nobody has asked for; then they are gone."""
        events, self.events = self.events, []
        return events

    def _walk(self) -> Iterator[Cached]:
        left = list(self._first.values())
        while left:
            cached = left.pop()
            yield cached
            left += cached.below.values()

    def _store(self, tokens: list[int]) -> None:
        parent: Cached | None = None
        new: list[Cached] = []
        for start in range(0, len(tokens), SIZE):
            part = tuple(tokens[start : start + SIZE])
            siblings = parent.below if parent else self._first
            if part not in siblings:
                (name,) = v1_names(part, len(part), parent.name if parent else 0)
                siblings[part] = Cached(name, part, tuple(tokens[: start + len(part)]), parent)
                new.append(siblings[part])
            parent = siblings[part]
        if new:
            above = new[0].parent
            told = [block(cached.name, cached.tokens) for cached in new]
            self._say(stored(told, above.name if above else None))

    def _drop(self, cached: Cached) -> None:
        names = [cached.name]
        if not self._cascade:
            left = [cached]
            while left:
                left += (below := left.pop().below.values())
                names += [child.name for child in below]
        (cached.parent.below if cached.parent else self._first).pop(cached.tokens)
        self._say(removed(*names))

    def _move(self, cached: Cached) -> None:
        before, cached.level = cached.level, 1 - cached.level
        self._say(moved(cached.name, before, cached.level))

    def _say(self, data: dict[str, Any], window: int | None = None) -> None:
        """Announce something, once a window; the smaller ones say their own things, here the same."""
        for size in self._windows if window is None else (window,):
            self.events.append(event(data, self.next, size, **self._rank))
            self.next += 1


class EventServer:
    """Answers `POST /kv_cache_events` on a port that is its own over restarts, or does not, as told."""

    def __init__(self, *engines: TreeEngine) -> None:
        self.engines = list(engines)
        self.faults: deque[Fault] = deque()  # of the next polls
        self.polled_s: list[float] = []  # when
        self._port = free_ports(1)[0]
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where to ask."""
        return f"http://{LOOPBACK}:{self._port}"

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._serve, LOOPBACK, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything."""
        await self.stop()

    async def stop(self) -> None:
        """Die; `restart` may follow."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.close()
            await self._server.wait_closed()
            self._server = None

    async def restart(self, *engines: TreeEngine) -> None:
        """Begin anew under the same address."""
        await self.stop()
        self.engines = list(engines)
        await self.__aenter__()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._answer(await reader.readuntil(b"\r\n\r\n"), writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> bool:
        """Write the answer; return whether the connection goes on."""
        if not head.startswith(b"POST /kv_cache_events "):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        self.polled_s.append(asyncio.get_running_loop().time())
        fault = self.faults.popleft() if self.faults else None
        if fault == "refused":
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
            return True
        events = [event for engine in self.engines for event in engine.drain()]
        body = b"<html>" if fault == "garbage" else msgspec.json.encode(events)
        if fault == "lost":
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body[: len(body) // 2] if fault == "cut" else body)
        return fault != "cut"
