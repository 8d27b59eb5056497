"""One rank as a process would run it: steps of an engine in simulated time, batches out, answers to whoever waits."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ops.simulator.publisher import Framing, Publisher
from ops.simulator.settings import ServerSettings
from schemas.errors import Unavailable

Encode = Callable[[float, Sequence[Any], int], bytes]
"""Return the payload of a batch: its time, its events, its rank."""


class Plan(Protocol):
    """Who computes what in one step."""

    @property
    def prefill_tokens(self) -> int:
        """Return the tokens of prompts."""

    @property
    def decodes(self) -> int:
        """Return the requests that get their next token."""


class Outcome(Protocol):
    """What one step leaves behind."""

    @property
    def finished(self) -> Sequence[Any]:
        """Return the requests that ended, each with its `request`."""

    @property
    def events(self) -> Sequence[Any]:
        """Return what is to be published."""


class Engine(Protocol):
    """What a rank steps: a simulated vLLM or SGLang."""

    @property
    def busy(self) -> bool:
        """Return whether a step would do something."""

    def submit(self, request: Any) -> None:
        """Queue a request, or raise BadRequest."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def reset_prefix_cache(self) -> bool:
        """Clear the cache unless a request runs."""

    def schedule(self) -> Any:
        """Return the next step's Plan."""

    def complete(self, plan: Any) -> Outcome:
        """End a step."""


class Rank:
    """Owns one engine and its publisher; `run` is the only task that steps it."""

    def __init__(self, settings: ServerSettings, number: int, engine: Engine, encode: Encode, framing: Framing) -> None:
        self.number = number
        self.publisher = Publisher(settings, number, framing)
        self._settings = settings
        self._engine = engine
        self._encode = encode
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._work = asyncio.Event()
        self._work.set()  # some engines publish before the first request

    async def answer(self, request: Any) -> Any:
        """Run one request to its end; cancelled, the request is aborted.

        Raises:
            BadRequest: the engine cannot hold it.
            Unavailable: the engine stopped.
        """
        self._engine.submit(request)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = answer
        self._work.set()
        try:
            return await answer
        finally:
            if self._answers.pop(request.id, None) is not None:
                self._engine.abort(request.id)

    def reset_prefix_cache(self) -> bool:
        """Clear the cache unless a request runs; subscribers hear of it with the next step."""
        done = self._engine.reset_prefix_cache()
        self._work.set()
        return done

    async def run(self) -> None:
        """Step while there is work, until cancelled; then whoever still waits is told."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._engine.busy:
                    await self._step()
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(Unavailable("the engine stopped"))

    async def _step(self) -> None:
        plan = self._engine.schedule()
        await asyncio.sleep(self._duration_s(plan))
        outcome = self._engine.complete(plan)
        if outcome.events:
            await self.publisher.publish(self._encode(time.time(), outcome.events, self.number))
        for finished in outcome.finished:
            answer = self._answers.pop(finished.request.id, None)
            if answer is not None and not answer.done():
                answer.set_result(finished)

    def _duration_s(self, plan: Plan) -> float:
        """Return how long the step takes: its prefill tokens one after another, its decodes side by side."""
        duration_s = 0.0
        if self._settings.prefill_tokens_per_s:
            duration_s += plan.prefill_tokens / self._settings.prefill_tokens_per_s
        if plan.decodes and self._settings.decode_tokens_per_s:
            duration_s += 1 / self._settings.decode_tokens_per_s
        return duration_s
