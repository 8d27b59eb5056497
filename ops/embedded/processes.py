"""Child processes that never outlive this process, and loopback ports for them."""

import asyncio
import random
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_POLL_S = 0.05

# Below the ranges that outgoing connections take their ports from (32768 and up on Linux, 49152 and up on macOS): there
# a client that retries while its service is down may get the service's own port, connect to itself and keep the port.
_PORTS = range(20_000, 32_768)

# The pipe on stdin ends when this process does, however it does; only a line on it, sent at an orderly stop, says that
# there is nothing to kill. `$$` is the shell's pid also in the subshell, and the program keeps that pid. Unlike Linux'
# PR_SET_PDEATHSIG this works on macOS, and does not fire when merely the thread that started the child ends.
_GUARD = 'exec 3<&0 </dev/null; (read -r _ <&3 || kill -9 $$) & exec 3<&-; exec "$@"'


def free_ports(count: int) -> list[int]:
    """Return that many distinct loopback ports on which nothing listens at the moment."""
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            port = random.choice(_PORTS)
            candidate = held.enter_context(socket.socket())
            with suppress(OSError):
                candidate.bind((LOOPBACK, port))
                ports.append(port)
        return ports


def listens(port: int) -> bool:
    """Return whether something accepts connections on this loopback port."""
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


class ChildProcess:
    """A running program that is killed when this process ends in any way, `kill -9` too.

    Its output is appended to the log file, and it runs in the log's folder. It has a session of its own, so that
    Ctrl-C on a terminal reaches this process alone, which then stops it in order.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    async def exited(self, timeout_s: float) -> int | None:
        """Return the exit code, or None where it still runs after that time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            code = self.exit_code
            if code is not None or time.monotonic() > deadline_s:
                return code
            await asyncio.sleep(_POLL_S)

    async def ready(self, answers: Callable[[], Awaitable[bool]], timeout_s: float) -> str | None:
        """Return None once `answers` is true, else what went wrong; then, and if cancelled, no process is left."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not await answers():
                if self.exit_code is not None:
                    failure = f"exited with {self.exit_code} while starting"
                    break
                if time.monotonic() > deadline_s:
                    failure = f"did not answer within {timeout_s:g} s"
                    break
                await asyncio.sleep(_POLL_S)
            else:
                return None
        except BaseException:
            self.kill()
            raise
        self.kill()
        return failure

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL if it still runs after that time; returns when it is gone."""
        try:
            self._process.terminate()
            await self.exited(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL; returns when it is gone. Nothing happens where it is gone already."""
        self._process.kill()
        self._process.wait()
        guard = self._process.stdin
        if guard is not None and not guard.closed:
            with suppress(BrokenPipeError):
                guard.write(b"\n")
            guard.close()
