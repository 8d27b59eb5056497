"""Builders for the simulated SGLang cache: prompts of pages named by numbers, and events in few words."""

from collections.abc import Sequence
from typing import Any

from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.events import GPU, HOST
from ops.simulator.sglang.pages import PLAIN, Hasher, Key, Namespace, key_of
from schemas.sglang import AllBlocksCleared, BlockStored, Event

SIZE = 16
"""Tokens of a page: more than the ten below which nothing is loaded back."""


def cache_of(pages: int = 20, version: str = "0.5.23", **options: Any) -> Cache:
    """Return a cache that has told of its construction already."""
    cache = Cache(dialect_of(version), SIZE, pages, **options)
    cache.take_events()
    return cache


def key(*pages: int, namespace: Namespace = PLAIN) -> Key:
    """Return a prompt of whole pages, each named by a number."""
    tokens = [token for page in pages for token in range(page * 100, page * 100 + SIZE)]
    return key_of(tokens, namespace, SIZE, pairs=False)


def fill(cache: Cache, *pages: int, namespace: Namespace = PLAIN) -> int:
    """Compute a prompt as a request of its own would, and let go of it; return how many pages were hit."""
    asked = key(*pages, namespace=namespace)
    match = cache.match(asked)
    cache.lock(match.device)
    loaded = cache.load_back(match) if match.host_pages else 0
    node = match.best if loaded else match.device
    cache.lock(node)
    cache.unlock(match.device)
    owned = match.device_pages + loaded
    assert cache.make_room((len(pages) - owned) * SIZE)
    cache.take(len(pages) - owned)
    cache.insert(asked, owned=owned, counted=0)
    cache.unlock(node)
    cache.settle()
    return owned


def name_of(*pages: int) -> int:
    """Return the announced name of the last page of a plain prompt."""
    hasher = Hasher(dialect_of("0.5.23"))
    return hasher.announced(PLAIN, hasher.chain(PLAIN, None, key(*pages).pages)[-1])


def told(events: Sequence[Event], *prompts: Sequence[int]) -> list[str]:
    """Return events in few words, each page by its number, as far as it is of one of the prompts."""
    numbers = {name_of(*prompt[: at + 1]): prompt[at] for prompt in prompts for at in range(len(prompt))}
    return [_told(event, numbers) for event in events]


def _told(event: Event, numbers: dict[int, int]) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared"
    tier = {GPU: "gpu", HOST: "host"}.get(event.medium or "", "?")
    sign = "+" if isinstance(event, BlockStored) else "-"
    return f"{sign}{tier} " + " ".join(str(numbers.get(name, "?")) for name in event.block_hashes)
