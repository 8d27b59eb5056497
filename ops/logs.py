"""Logs: structlog to stdout (tools: stderr), readable on a terminal, JSON elsewhere."""

import logging
import sys
from typing import Any, Literal, TextIO

import structlog


def configure(
    level: str = "info", form: Literal["auto", "console", "json"] = "auto", stream: TextIO | None = None
) -> None:
    """Send all logs, the libraries' too, to the stream (stdout) in one form."""
    output = stream or sys.stdout
    console = form == "console" or (form == "auto" and output.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
