"""Drive real engines through the whole stack and compare each prediction with what the engine reused.

python serve.py --json engines.json --replicas 2 --restart        # real vLLM servers, see tests/live/README.md
python -m tests.live.drive engines.json --requests 500 --kill
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import zmq.asyncio

from ops import logs
from ops.demo.agreement import Agreement
from ops.stack import RouterClient, Stack
from tests.live.engines import Completion, LiveEngine, complete, load_engines, newest_sequence

_SETTLED_S = 0.03
_DEADLINE_S = 300.0


class Talk:
    """Conversations over a few system prompts, some salted; every turn extends what the engine said."""

    def __init__(self, seed: int, engine: LiveEngine, salted: float) -> None:
        self._rng = random.Random(seed)
        self._salted = salted
        self._vocabulary = engine.vocab_size
        self._longest = engine.max_model_len - 200
        self._systems = [self._tokens(self._rng.randrange(40, 400)) for _ in range(5)]
        self._chats: list[tuple[list[int], str | None]] = []

    def prompt(self) -> tuple[int, list[int], str | None]:
        """Return (conversation, prompt, salt)."""
        if len(self._chats) < 6 or self._rng.random() < 0.15:
            salt = f"tenant-{self._rng.randrange(2)}" if self._rng.random() < self._salted else None
            self._chats.append((list(self._rng.choice(self._systems)), salt))
            number = len(self._chats) - 1
        else:
            number = self._rng.randrange(max(0, len(self._chats) - 25), len(self._chats))
        tokens, salt = self._chats[number]
        if len(tokens) > self._longest:
            tokens = list(self._rng.choice(self._systems))
        tokens = tokens + self._tokens(self._rng.randrange(5, 120))
        return number, tokens, salt

    def answered(self, number: int, prompt: list[int], answer: list[int]) -> None:
        """Extend a conversation."""
        self._chats[number] = (prompt + answer, self._chats[number][1])

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._vocabulary) for _ in range(count)]


class Driver:
    """Asks the router, sends the completion, compares."""

    def __init__(
        self, stack: Stack, client: RouterClient, http: httpx.AsyncClient, engines: list[LiveEngine], facts: list[str]
    ) -> None:
        self.one_by_one = Agreement()
        self.together = Agreement()
        self.misses: list[str] = []
        self._stack = stack
        self._client = client
        self._http = http
        self._engines = {engine.replica: engine for engine in engines}
        self._facts = facts
        self._model = engines[0].model
        self._context = zmq.asyncio.Context()
        self._rng = random.Random(7)
        self._newest = dict.fromkeys(self._engines, -1)

    def start_relay(self, engine: LiveEngine) -> None:
        """Start the relay beside an engine."""
        arguments = ["--model", self._model, "--replica", engine.replica, "--engine-version", engine.version]
        arguments += ["--events", engine.events, "--replay", engine.replay, "--topic", engine.topic]
        for fact in self._facts:
            arguments += ["--set", fact]
        self._stack.start_relay(arguments, f"relay-{engine.replica}")

    async def settled(self, replica: str) -> None:
        """Wait until all that an engine published is in the index."""
        engine = self._engines[replica]
        newest = None
        while True:
            again = await newest_sequence(self._context, engine, max(0, self._newest[replica]))
            if again is not None and again == newest:
                break
            if again is None and self._newest[replica] <= 0:
                return  # it has published nothing
            if again is None:
                self._newest[replica] = 0  # it restarted: its ring begins again
            newest = again
            await asyncio.sleep(_SETTLED_S)
        self._newest[replica] = newest
        await self._client.wait_applied(self._model, f"{replica}/0", newest, timeout_s=_DEADLINE_S)

    async def one(self, talk: Talk, number: int) -> None:
        """Price, complete and compare one request, alone in the fleet."""
        for replica in self._engines:
            await self.settled(replica)
        conversation, prompt, salt = talk.prompt()
        answer = await self._client.price({"model": self._model, "token_ids": prompt, "cache_salt": salt})
        by_name = {r["replica"]: r for r in answer["replicas"]}
        best = answer["best"].split("/")[0]
        replica = best if self._rng.random() < 0.7 else self._rng.choice(list(self._engines))
        done = await complete(self._http, self._engines[replica], prompt, self._rng.randrange(4, 24), salt)
        talk.answered(conversation, prompt, done.tokens)
        self._compare(self.one_by_one, f"request {number} on {replica}", by_name[replica], done)

    async def many(self, talk: Talk, requests: int, clients: int) -> None:
        """Drive several clients at once; events then lag behind decisions."""
        numbers = iter(range(requests))

        async def client() -> None:
            for _ in numbers:
                conversation, prompt, salt = talk.prompt()
                answer = await self._client.price({"model": self._model, "token_ids": prompt, "cache_salt": salt})
                replica = answer["best"].split("/")[0]
                chosen = next(r for r in answer["replicas"] if r["replica"] == replica)
                done = await complete(self._http, self._engines[replica], prompt, 8, salt)
                talk.answered(conversation, prompt, done.tokens)
                self._compare(self.together, "", chosen, done)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())

    async def kill_relay(self) -> None:
        """Kill a relay and start it again."""
        engine = next(iter(self._engines.values()))
        await self._stack.stop_part(f"relay-{engine.replica}", hard=True)
        self.start_relay(engine)

    async def kill_worker(self) -> None:
        """Kill the worker and start it again."""
        await self._stack.stop_part("worker", hard=True)
        self._stack.start_worker()

    async def kill_engine(self) -> None:
        """Kill an engine; its starter starts it again on the same ports."""
        engine = next(iter(self._engines.values()))
        os.killpg(engine.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _DEADLINE_S
        await asyncio.sleep(5.0)  # until its port is closed
        while True:
            try:
                if (await self._http.get(f"{engine.url}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{engine.replica} did not come back")
            await asyncio.sleep(1.0)

    def _compare(self, agreement: Agreement, what: str, told: dict[str, object], done: Completion) -> None:
        predicted = int(str(told["reusable_tokens"]))
        agreement.add(done.prompt_tokens, predicted, done.cached_tokens)
        agreement.unknown += told["state"] == "unknown"
        if what and predicted != done.cached_tokens:
            miss = f"{what}: predicted {predicted} ({told['state']}), engine {done.cached_tokens}"
            self.misses.append(miss)
            _print(miss)


async def drive(arguments: argparse.Namespace) -> int:
    """Return 0 where every request that ran alone was predicted to the token."""
    engines = load_engines(arguments.engines)
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(Stack([engines[0].model], folder=arguments.folder))
        client = await exits.enter_async_context(RouterClient(stack.router_url))
        http = await exits.enter_async_context(httpx.AsyncClient(timeout=120.0))
        driver = Driver(stack, client, http, engines, arguments.set)
        for engine in engines:
            driver.start_relay(engine)
        await _heard_of(client, engines)
        talk = Talk(arguments.seed, engines[0], arguments.salted)
        kills = {}
        if arguments.kill:
            marks = [arguments.requests * part // 4 for part in (1, 2, 3)]
            kills = dict(zip(marks, (driver.kill_relay, driver.kill_worker, driver.kill_engine), strict=True))
        began_s = time.monotonic()
        for number in range(arguments.requests):
            if number in kills:
                _print(f"{number}: {kills[number].__name__}")
                await kills[number]()
            await driver.one(talk, number)
            if number % 50 == 49:
                _print(f"{number + 1} requests, {driver.one_by_one.exact} exact, {time.monotonic() - began_s:.0f} s")
        await driver.many(talk, arguments.together, 4)
    _show("one at a time", driver.one_by_one)
    _show("four at once ", driver.together)
    return 0 if driver.one_by_one.exact == driver.one_by_one.requests else 1


async def _heard_of(client: RouterClient, engines: list[LiveEngine]) -> None:
    deadline_s = time.monotonic() + 60.0
    while len(await client.statuses(engines[0].model)) < len(engines):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the router has not heard of all replicas")
        await asyncio.sleep(0.2)


def _show(name: str, a: Agreement) -> None:
    _print(
        f"{name}: {a.requests} requests, {a.exact} exact, reuse {a.reuse:.2%}, coverage {a.coverage:.2%}, "
        f"over-credit {a.over_credit:.2%}, unknown {a.unknown}"
    )


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("engines", type=Path, help="the list that the engines' starter wrote")
    parser.add_argument("--requests", type=int, default=500, help="one at a time")
    parser.add_argument("--together", type=int, default=200, help="afterwards, four at once")
    parser.add_argument("--kill", action="store_true", help="kill a relay, the worker and an engine on the way")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--salted", type=float, default=0.15, help="share of conversations with a salt (vLLM 0.17 on)")
    parser.add_argument("--folder", type=Path, help="for logs and data (default: a temporary one)")
    parser.add_argument("--set", action="append", default=[], help="facts for the relays, as in `kvatlas relay --set`")
    logs.configure("warning", "auto", sys.stderr)
    sys.exit(asyncio.run(drive(parser.parse_args())))


if __name__ == "__main__":
    main()
