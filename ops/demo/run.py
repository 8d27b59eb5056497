"""Runs the demo: starts everything, drives it, prints progress and a summary, and stops everything."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from index.redis_store import RedisStore
from ops.demo.drive import Drive, say
from ops.demo.fleet import MODEL, Fleet, FleetName, fleet_of
from ops.settings import Settings, listed
from ops.stack import NotReady, RouterClient, Stack, given_services
from schemas.errors import ConfigError, Stale

_READY_S = 120.0
_WATCH_S = 0.5


async def run_demo(seconds: float, fleet_name: FleetName, settings: Settings, stop: asyncio.Event) -> int:
    """Return 0 after a whole run, 1 where no request finished, 130 after an interrupted one.

    Raises:
        ConfigError: the time is none.
        Unavailable: something did not start, or ended by itself; all logs are kept then, and named.
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds: {seconds:g} is not above 0")
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-demo-"))
    try:
        code = await _run(seconds, fleet_of(fleet_name), settings, stop, folder)
    except Exception:
        say(f"\nall logs: {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return code


async def _run(seconds: float, fleet: Fleet, settings: Settings, stop: asyncio.Event, folder: Path) -> int:
    brokers, redis_url = given_services(settings)
    services = f"{brokers or 'Kafka'}, {'the given Redis' if redis_url else 'Valkey'}"  # its URL may hold a password
    say(f"starting {services}, {fleet}, their relays, a worker and a router ...")
    began_s = time.monotonic()
    if redis_url is not None:
        await _check_redis(redis_url, settings)
    async with AsyncExitStack() as exits:
        stack = Stack([MODEL], brokers=brokers, redis_url=redis_url, folder=folder)
        if not await _unless(stop, _start(exits, stack, fleet)):
            return 130
        say(f"all ready after {time.monotonic() - began_s:.0f} s; prices at {stack.router_url}/v1/price")
        client = await exits.enter_async_context(RouterClient(stack.router_url))
        drive = Drive(client, fleet)
        await _unless(stop, _while_all_run(stack, drive.run(seconds)))
        drive.summarize()
    if stop.is_set():
        return 130
    return 0 if drive.agreement.requests else 1


async def _check_redis(redis_url: str, settings: Settings) -> None:
    """Raise StoreUnavailable where a given Redis does not answer; its router would only wait for it."""
    store = RedisStore.from_urls(listed(redis_url), settings.shards, timeout_s=settings.redis_timeout_s)
    try:
        with suppress(Stale):  # no index in it yet
            await store.holders(MODEL)
    finally:
        await store.close()


async def _start(exits: AsyncExitStack, stack: Stack, fleet: Fleet) -> None:
    """Return when the router knows every engine and pool of the fleet."""
    await exits.enter_async_context(stack)
    for name, arguments in fleet.parts.items():
        stack.start(name, arguments)
    say(f"Kafka, Redis, worker and router answer; {len(fleet.parts)} processes more are starting ...")
    await _while_all_run(stack, _until_known(stack, fleet))


async def _until_known(stack: Stack, fleet: Fleet) -> None:
    deadline_s = time.monotonic() + _READY_S
    async with RouterClient(stack.router_url) as client:
        while True:
            statuses = await client.statuses(MODEL)
            states = {name: statuses[name]["state"] if name in statuses else "unknown" for name in fleet.holders}
            # an engine that has served nothing has announced nothing: `silent` is all that can be known
            if set(states.values()) <= {"live", "silent"}:
                return
            if time.monotonic() > deadline_s:
                raise NotReady(f"after {_READY_S:.0f} s the router says {states}")
            await asyncio.sleep(0.1)


async def _while_all_run(stack: Stack, body: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end.

    Raises:
        NotReady: a process of the stack ended by itself; the message has the last line of its log.
    """
    running = asyncio.create_task(body)
    try:
        while not running.done():
            stack.check_parts()
            await asyncio.wait((running,), timeout=_WATCH_S)
        if running.exception() is not None:
            # a process that died says more than who missed its answer; it is gone by then
            await asyncio.sleep(_WATCH_S)
            stack.check_parts()
        running.result()
    finally:
        await _end(running)


async def _unless(stop: asyncio.Event, body: Coroutine[Any, Any, None]) -> bool:
    """Run a coroutine, but not beyond `stop`; return whether it finished."""
    task, stopped = asyncio.create_task(body), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        await _end(task, stopped)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end; whoever wants to know how they ended has asked before."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
