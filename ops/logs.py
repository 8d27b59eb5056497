"""Logs: structlog to stdout, readable on a terminal, JSON elsewhere."""

import logging
import sys
from typing import Any, Literal

import structlog


def configure(level: str = "info", form: Literal["auto", "console", "json"] = "auto") -> None:
    """Send all logs, the libraries' too, to stdout in one form."""
    console = form == "console" or (form == "auto" and sys.stdout.isatty())
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
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def get_logger(name: str) -> Any:
    """Return a logger; events are fixed names `package.what_happened`, the rest are fields."""
    return structlog.get_logger(logger=name)
