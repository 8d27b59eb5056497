"""Logs: structlog to stdout (tools: stderr), readable on a terminal, JSON elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal, TextIO

import msgspec
import structlog


def configure(
    level: str = "info", form: Literal["auto", "console", "json"] = "auto", stream: TextIO | None = None
) -> None:
    """Send all logs, the libraries' too, to the stream (stdout) in one form."""
    output = stream or sys.stdout
    console = form == "console" or (form == "auto" and output.isatty())
    sparing = Sparing()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[sparing, *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(formatter)
    handler.addFilter(sparing)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


class Sparing:
    """Lets five lines of a kind pass in ten seconds; the next one that passes says how many were left out.

    What fails, or is refused, in a loop would fill a disk: aiokafka alone writes a hundred lines a second while a
    broker is away, and eight hundred where a topic is missing. What must not be lost is counted or kept elsewhere.
    """

    _EVERY_S = 10.0
    _LINES = 5
    _KINDS = 1000  # remembered; a library may put what differs into its text

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seen: dict[Hashable, _Seen] = {}

    def left_out(self, kind: Hashable) -> int | None:
        """Return how many lines were left out before this one; None where this one is to be left out too."""
        now_s = self._clock_s()
        seen = self._seen.get(kind)
        if seen is None:
            if len(self._seen) >= self._KINDS:
                self._seen.clear()
            seen = self._seen[kind] = _Seen(now_s)
        elif now_s - seen.since_s >= self._EVERY_S:
            seen.since_s, seen.passed = now_s, 0
        if seen.passed >= self._LINES:
            seen.left_out += 1
            return None
        seen.passed += 1
        left_out, seen.left_out = seen.left_out, 0
        return left_out

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a library's line is written."""
        left_out = self.left_out((record.name, str(record.msg)))
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} like this)", None
        return left_out is not None

    def __call__(self, logger: Any, method: str, line: Any) -> Any:
        """Return one of our own lines, if it is to be written."""
        if method not in ("warning", "error"):
            return line
        left_out = self.left_out((line["event"], *(line.get(field) for field in _KIND)))
        if left_out is None:
            raise structlog.DropEvent
        return line | {"left_out": left_out} if left_out else line


_KIND = ("model", "holder", "topic", "partition", "reason")


class _Seen(msgspec.Struct):
    """What passed of one kind."""

    since_s: float
    passed: int = 0
    left_out: int = 0
