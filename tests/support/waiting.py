"""Waiting for a condition, in place of sleeping for a time."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Return once the condition holds; a test that waits longer than that fails with `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.02)
