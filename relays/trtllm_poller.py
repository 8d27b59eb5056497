"""Asks a TensorRT-LLM server for its KV events, for all of its attention-DP ranks at once (`POST /kv_cache_events`).

Asking takes the events out of the server's buffer, so this must be the only client that asks; a second one makes gaps.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice

import httpx
import structlog

from ops.metrics import RELAY_MESSAGES, RELAY_POLLS, RELAY_REJECTS
from ops.pauses import Pauses
from relays.engine import EngineRank
from relays.pulled import PulledSequence
from relays.source import Owner, RankSource
from relays.trtllm import MAX_DRAIN_BYTES, Drained, split_drain
from schemas.errors import ConfigError, FrameError
from schemas.events import HolderState

PATH = "/kv_cache_events"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # after a failed poll
_SHORTEST_IDLE_S = 0.01  # the server gathers about every 5 ms
_CONNECT_S = 5.0
_AT_ONCE = 32  # events before others get their turn


class PollFailed(Exception):
    """An answer that cannot be used; what it held is lost."""


class PulledRank(RankSource):
    """One rank of a server that must be asked: its order, its windows and its mirror."""

    def __init__(self, engine: EngineRank, owner: Owner) -> None:
        super().__init__(engine, owner)
        self._sequence = PulledSequence(engine.mirror.profile.window_sizes)
        self._lost_s: float | None = None  # since when polls fail

    def take(self, event: Drained, now_s: float) -> None:
        """Take the rank's next event."""
        heard = self._sequence.take(event.event_id, event.window, created=event.created)
        if heard.ended is not None:
            self.begin_life(heard.ended, keep=False)
        self.engine.learn_windows(self._sequence.windows)
        if heard.applies:
            self._report(event.event_id, self.engine.take(event.event_id, event.payload, now_s=now_s))
        else:
            self.engine.received["0"] = event.event_id
        self.engine.time_s = time.time()  # the events have no clock of their own
        self._on_change()

    def doubt(self, now_s: float) -> None:
        """Note that a poll failed; the rank's next event decides what was lost."""
        self._sequence.doubt()
        if self._lost_s is None:
            self._lost_s = now_s

    def answered(self) -> None:
        """Note that the server answers."""
        if self._lost_s is not None:
            self._lost_s = None
            self._on_change()  # also before the first event: the profile

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        if self._lost_s is not None:
            return self._unconnected(self._lost_s, now_s)
        if not self.engine.received:
            return "silent", "no event seen yet"
        if self._sequence.doubtful:
            return "stale", "poll_failed"
        return "live", "no_replay"


class EventPoller:
    """Asks one server for as long as it runs; ranks come with their first event."""

    def __init__(
        self,
        endpoint: str,
        ranks: Iterable[PulledRank],
        new_rank: Callable[[int], PulledRank],
        *,
        idle_s: float,
        timeout_s: float,
    ) -> None:
        self._url = events_url(endpoint)
        self._ranks = list(ranks)
        self._new_rank = new_rank
        self._idle_s = idle_s  # longest pause between polls of a server that has nothing to say
        self._timeout_s = timeout_s
        self._log = structlog.get_logger().bind(replica=self._ranks[0].engine.holder.name)
        self._label = self._ranks[0].engine.mirror.profile.engine
        self._failing: bool | None = None  # None: never asked

    async def run(self) -> None:
        """Ask until cancelled."""
        now_s = asyncio.get_running_loop().time()
        for rank in self._ranks:
            rank.doubt(now_s)  # nobody has answered yet
        timeout = httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, _CONNECT_S))
        # the server stands beside: no proxy, and nothing to compress
        async with httpx.AsyncClient(
            timeout=timeout, trust_env=False, headers={"Accept-Encoding": "identity"}
        ) as client:
            pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            idle_s = 0.0
            while True:
                try:
                    count = await self._poll(client)
                except (PollFailed, httpx.HTTPError) as error:
                    pause_s = pauses.next_s()
                    self._on_failure(error, pause_s)
                    await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))
                    continue
                pauses.reset()
                idle_s = _SHORTEST_IDLE_S if count else min(max(idle_s * 1.5, _SHORTEST_IDLE_S), self._idle_s)
                await asyncio.sleep(idle_s)

    async def _poll(self, client: httpx.AsyncClient) -> int:
        """Ask once and take what came; return how many events."""
        body = await self._ask(client)
        try:
            drained, rejects = split_drain(body)
        except FrameError as error:
            RELAY_REJECTS.labels(self._label, error.reason).inc()
            raise PollFailed(str(error)) from error
        for reject in rejects:
            RELAY_REJECTS.labels(self._label, reject.reason).inc()
            self._log.warning("relay.event_refused", reason=reject.reason, at=reject.detail, position=reject.position)
        self._on_answer()
        RELAY_MESSAGES.labels(self._label, "pulled").inc(len(drained))
        await self._take(drained)
        return len(drained)

    async def _ask(self, client: httpx.AsyncClient) -> bytes:
        body = bytearray()
        async with client.stream("POST", self._url) as response:
            if response.status_code != httpx.codes.OK:
                raise PollFailed(f"status {response.status_code}")
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_DRAIN_BYTES:
                    RELAY_REJECTS.labels(self._label, "payload_bytes").inc()
                    raise PollFailed(f"more than {MAX_DRAIN_BYTES} bytes")
        return bytes(body)

    async def _take(self, drained: Iterable[Drained]) -> None:
        """Give each rank its events in their order."""
        loop = asyncio.get_running_loop()
        by_number = {rank.engine.holder.rank: rank for rank in self._ranks}
        events = iter(drained)
        while batch := list(islice(events, _AT_ONCE)):
            for event in batch:
                rank = by_number.get(event.rank)
                if rank is None:
                    rank = by_number[event.rank] = self._new_rank(event.rank)
                    self._ranks.append(rank)
                    self._log.info("relay.rank_found", rank=event.rank)
                rank.take(event, loop.time())
            await asyncio.sleep(0)

    def _on_answer(self) -> None:
        RELAY_POLLS.labels(self._label, "answered").inc()
        if self._failing is not False:
            self._log.info("relay.connected")
        self._failing = False
        for rank in self._ranks:
            rank.answered()

    def _on_failure(self, error: Exception, pause_s: float) -> None:
        RELAY_POLLS.labels(self._label, "failed").inc()
        if not self._failing:
            self._log.warning(
                "relay.poll_failed", error=f"{type(error).__name__}: {error}", pause_s=pause_s, url=self._url
            )
        self._failing = True
        now_s = asyncio.get_running_loop().time()
        for rank in self._ranks:
            rank.doubt(now_s)


def events_url(endpoint: str) -> str:
    """Return the address to ask; a path that is given is kept.

    Raises:
        ConfigError: no HTTP address.
    """
    with suppress(httpx.InvalidURL):
        url = httpx.URL(endpoint)
        if url.scheme in ("http", "https") and url.host:
            return str(url if url.path not in ("", "/") else url.copy_with(path=PATH))
    raise ConfigError(f"endpoint: {endpoint!r} is no HTTP address")
