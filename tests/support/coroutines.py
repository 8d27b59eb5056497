"""Coroutines that never wait, run without an event loop: the memory store's."""

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def immediate(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise AssertionError("the coroutine waits for something")
