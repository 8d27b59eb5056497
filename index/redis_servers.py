"""The Redis servers of one store: shard s of a model lives on server s mod servers; their errors come out as ours."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, cast

import redis.asyncio as aioredis
from redis.exceptions import RedisError, ResponseError

from index.redis_link import Link
from schemas.errors import StaleIndex, StoreUnavailable


class Servers:
    """Reaches each server in two ways: `call` over a lean link, `command` through redis-py, which reads its reply."""

    def __init__(self, clients: "Sequence[aioredis.Redis]") -> None:
        self._clients = list(clients)
        self._links = [Link(client) for client in self._clients]

    @property
    def losses(self) -> int:
        """How many links broke so far, of all servers."""
        return sum(link.losses for link in self._links)

    async def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            link.close()
        for client in self._clients:
            await client.aclose()

    def link(self, shard: int) -> Link:
        """Return the link to a shard's server; whoever uses it does so inside TRANSLATED."""
        return self._links[shard % len(self._links)]

    async def call(self, shard: int, *command: Any) -> Any:
        """Return a command's reply as the server sent it."""
        with TRANSLATED:
            return await self.link(shard).call(*command)

    async def command(self, shard: int, *command: Any) -> Any:
        """Return a command's reply as redis-py reads it: a mapping of HGETALL, a set of SMEMBERS."""
        with TRANSLATED:
            return await cast("Any", self._client(shard)).execute_command(*command)

    async def command_all(self, *command: Any) -> None:
        """Give a command to every server."""
        for server in range(len(self._clients)):
            await self.command(server, *command)

    async def transaction(self, shard: int, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Return the replies of commands that are carried out as one, with nothing in between."""
        with TRANSLATED:
            async with self._client(shard).pipeline(transaction=True) as pipe:
                queue = cast("Any", pipe).execute_command
                for command in commands:
                    queue(*command)
                return await pipe.execute()

    def _client(self, shard: int) -> "aioredis.Redis":
        return self._clients[shard % len(self._clients)]


class _Translated:
    """Raises the library's errors as ours."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Translate."""
        if isinstance(error, ResponseError):
            text = str(error)
            if text.startswith("KVSTALE") or "Function not found" in text:
                raise StaleIndex(text) from error
            raise StoreUnavailable(text) from error
        if isinstance(error, RedisError | OSError):
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error


TRANSLATED = _Translated()
"""A context that turns redis-py's errors into ours; `contextmanager` would cost more than what it wraps."""


async def gather(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the results of calls to several shards, made at the same time; of a single one without a task."""
    listed = list(calls)
    if len(listed) == 1:
        return [await listed[0]]
    return list(await asyncio.gather(*listed))
