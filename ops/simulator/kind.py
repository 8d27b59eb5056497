"""What a server needs to know of the engine behind it: its requests, answers and ranks."""

from typing import Any, ClassVar, Protocol

import msgspec
from starlette.responses import Response

from ops.simulator.api import Completion
from ops.simulator.rank import Rank


class Asked(msgspec.Struct, frozen=True):
    """One completion that a client wants."""

    completion: Completion
    model: str  # that the client named
    request: Any  # of the engine's own kind; None: no model or adapter has that name
    rank: int | None  # None: any


class Kind(Protocol):
    """A simulated vLLM or SGLang, as a server sees it."""

    reset_path: ClassVar[str]
    reset_methods: ClassVar[tuple[str, ...]]
    info_paths: ClassVar[tuple[str, ...]]

    @property
    def version(self) -> str:
        """Return the engine's version."""

    def rank(self, number: int) -> Rank:
        """Return one rank, its ports bound."""

    def read(self, body: bytes, request_id: str, rank_header: str | None) -> Asked:
        """Return what is asked for, or raise BadRequest."""

    def answer(self, asked: Asked, finished: Any, created_s: int) -> msgspec.Struct:
        """Return a finished request's answer."""

    def answer_reset(self, *, done: bool) -> Response:
        """Return the answer to a reset of the cache."""

    def models(self, created_s: int) -> list[Any]:
        """Return the model and its adapters."""

    def info(self) -> dict[str, Any]:
        """Return what the engine says of itself, its version above all."""

    def metrics(self) -> str | None:
        """Return its counters as Prometheus' text, or None where they are not simulated."""

    def close(self) -> None:
        """Let go of what the ranks share."""
