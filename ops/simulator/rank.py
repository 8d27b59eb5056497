"""One rank as a process would run it: steps of an engine in simulated time, batches out, answers to whoever waits."""

import asyncio
import time

from ops.simulator.block_pool import BlockPool
from ops.simulator.chain import HashScheme
from ops.simulator.dialect import Dialect
from ops.simulator.engine import Engine, Finished, Limits, Plan, Request
from ops.simulator.publisher import Publisher
from ops.simulator.settings import SimulatorSettings
from ops.simulator.wire import encode_batch
from schemas.errors import Unavailable


class Rank:
    """Owns one engine and its publisher; `run` is the only task that steps it."""

    def __init__(self, settings: SimulatorSettings, number: int, root: bytes, dialect: Dialect) -> None:
        self.number = number
        self.publisher = Publisher(settings, number, dialect)
        self._settings = settings
        self._dialect = dialect
        self._engine = Engine(
            BlockPool(settings.blocks, settings.block_size, unhashed_first=dialect.unhashed_first),
            HashScheme(root, settings.block_size, dialect.tagged_keys),
            dialect,
            Limits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.model_len),
        )
        self._answers: dict[str, asyncio.Future[Finished]] = {}
        self._work = asyncio.Event()

    async def answer(self, request: Request) -> Finished:
        """Run one request to its end; cancelled, the request is aborted.

        Raises:
            BadRequest: the engine cannot hold it.
            Unavailable: the engine stopped.
        """
        self._engine.submit(request)
        answer: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = answer
        self._work.set()
        try:
            return await answer
        finally:
            if self._answers.pop(request.id, None) is not None:
                self._engine.abort(request.id)

    def reset_prefix_cache(self) -> bool:
        """Clear the cache unless a request runs; subscribers hear of it with the next step."""
        return self._engine.reset_prefix_cache()

    async def run(self) -> None:
        """Step while there is work, until cancelled; then whoever still waits is told."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._engine.running or self._engine.waiting:
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
            payload = encode_batch(time.time(), outcome.events, self.number, self._dialect)
            await self.publisher.publish(payload)
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
