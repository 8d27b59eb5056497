"""Something that runs beside a test."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar


class Runs(Protocol):
    """A relay, or a part of one: it runs until cancelled."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Run until cancelled."""


Part = TypeVar("Part", bound=Runs)


@asynccontextmanager
async def running(part: Part) -> AsyncIterator[Part]:
    """Run something for the time of a block; it must not end by itself."""
    task = asyncio.create_task(part.run())
    try:
        yield part
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
