"""A delivery that is started by hand and finished by the event loop (`streams.transport`)."""

import asyncio

import pytest

from streams.transport import _finish


async def test_a_started_delivery_is_finished() -> None:
    """What it waits for is handed to the loop, and later waits are its own."""
    room, done = asyncio.Event(), []

    async def deliver() -> None:
        await room.wait()
        await asyncio.sleep(0)
        done.append("delivered")

    delivery = deliver()
    finishing = asyncio.create_task(_finish(delivery, delivery.send(None)))
    await asyncio.sleep(0)
    assert not done
    room.set()
    await finishing
    assert done == ["delivered"]


async def test_a_cancelled_delivery_hears_of_it() -> None:
    """A rebalance ends the wait for room; the delivery can clean up, and nothing is delivered."""
    done = []

    async def deliver() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            done.append("cancelled")
            raise

    delivery = deliver()
    finishing = asyncio.create_task(_finish(delivery, delivery.send(None)))
    await asyncio.sleep(0)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert done == ["cancelled"]


async def test_a_failed_delivery_says_so() -> None:
    """An error after the wait is the caller's."""

    async def deliver() -> None:
        await asyncio.sleep(0)
        raise ValueError("no channel")

    delivery = deliver()
    with pytest.raises(ValueError, match="no channel"):
        await _finish(delivery, delivery.send(None))
