"""How a router ends."""

import asyncio

from index.memory_store import MemoryStore
from index.store import HolderRow
from ops.settings import Settings
from router.app import build_app


class Deaf(MemoryStore):
    """A store whose first read loses a cancellation, as `wait_for` of Python 3.11 does."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.reading = asyncio.Event()

    async def holders(self, model: str) -> list[HolderRow]:
        """Wait once for a cancellation and ignore it."""
        if not self.reading.is_set():
            self.reading.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return []
        return await super().holders(model)


async def test_a_router_ends_also_where_its_reader_does_not_hear_the_first_cancellation() -> None:
    store = Deaf()
    app = build_app(store, Settings(models="m", router_refresh_s=0.01))
    async with asyncio.timeout(5), app.router.lifespan_context(app):
        await store.reading.wait()
