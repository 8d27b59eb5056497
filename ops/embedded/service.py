"""What the embedded servers have in common: a child process that is started, asked until it answers, and stopped."""

import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import structlog

from ops.embedded.processes import ChildProcess
from schemas.errors import Unavailable

log = structlog.get_logger()


class EmbeddedService(ABC):
    """A server on loopback ports that are its own for life.

    `async with` starts and stops it. `stop` and `start` may follow each other on the same ports, in any event loop:
    nothing here belongs to one.
    """

    name: ClassVar[str]  # as errors and logs say it
    unavailable: ClassVar[type[Unavailable]]  # raised where it does not start
    stop_s: ClassVar[float]  # between SIGTERM and SIGKILL

    def __init__(self, log: Path, start_timeout_s: float) -> None:
        self.log = log
        self._start_timeout_s = start_timeout_s
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run, also where it ended by itself."""
        return self._child.pid if self._child is not None and self._child.exit_code is None else None

    @property
    @abstractmethod
    def address(self) -> str:
        """Where clients find it."""

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
        """Start the server, unless it runs; returns when it answers.

        Raises:
            ConfigError: the packages of `kvatlas[embedded]` are not installed.
            Unavailable: as the server's kind, where it cannot be had, exited or did not answer in time; the message
                names its log, and no process is left.
        """
        if self.pid is not None:
            return
        await self.stop(hard=True)  # what ended by itself leaves its guard
        began_s = time.monotonic()
        child = await self._launch()
        failure = await child.ready(self._answers, self._start_timeout_s)
        if failure is not None:
            raise self.unavailable(f"embedded {self.name} {failure}; its log: {self.log}")
        self._child = child
        took_s = round(time.monotonic() - began_s, 1)
        log.info("embedded.started", service=self.name, address=self.address, took_s=took_s)

    async def stop(self, *, hard: bool = False) -> None:
        """Stop the server, if it runs, by SIGTERM (and SIGKILL after `stop_s`) or, if `hard`, by SIGKILL at once."""
        child, self._child = self._child, None
        if child is None:
            return
        if hard:
            child.kill()
        else:
            await child.stop(self.stop_s)
        log.info("embedded.stopped", service=self.name, address=self.address, hard=hard)

    @abstractmethod
    async def _launch(self) -> ChildProcess:
        """Return the server's process, just started; raises as `start` does."""

    @abstractmethod
    async def _answers(self) -> bool:
        """Return whether it serves clients."""
