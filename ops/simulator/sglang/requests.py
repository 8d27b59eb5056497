"""What the scheduler deals with: requests, their pages, and steps; pure."""

from collections.abc import Sequence

import msgspec

from ops.simulator.sglang.pages import PLAIN, Namespace
from ops.simulator.sglang.tree import Node
from schemas.sglang import Event


class Request(msgspec.Struct, frozen=True):
    """One prompt, and the tokens that the engine will have generated for it."""

    id: str
    tokens: Sequence[int]
    completion: Sequence[int]
    namespace: Namespace = PLAIN


class Limits(msgspec.Struct, frozen=True):
    """What bounds an engine's steps and requests."""

    max_running_requests: int
    chunked_prefill_size: int  # tokens of one step's prompts
    context_length: int  # tokens of a request, its completion included


class Finished(msgspec.Struct, frozen=True):
    """One request's end."""

    request: Request
    cached_tokens: int  # of the prompt, when it was first scheduled
    host_tokens: int  # of these, loaded back from the host


class Plan(msgspec.Struct, frozen=True):
    """Who computes how many tokens in one step: prompts, or else one token each."""

    prefills: list[tuple["Running", int]]
    running: list["Running"]

    @property
    def prefill_tokens(self) -> int:
        """Return the tokens of prompts."""
        return sum(count for _, count in self.prefills)

    @property
    def decodes(self) -> int:
        """Return the requests that get their next token."""
        return len(self.running)


class Outcome(msgspec.Struct, frozen=True):
    """What one step leaves behind."""

    finished: list[Finished]
    events: list[Event]


class Running:
    """One request with its pages: those the tree owns, and its own."""

    __slots__ = (
        "cached_tokens",
        "computed",
        "generated",
        "host_tokens",
        "inserted",
        "node",
        "owned",
        "pages",
        "request",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.tokens)
        self.computed = 0  # tokens
        self.owned = 0  # whole pages of it that the tree owns, locked for it
        self.pages = 0  # behind them, its own
        self.inserted = 0  # whole pages of it that it has inserted itself
        self.node: Node | None = None  # that it locks
        self.cached_tokens: int | None = None
        self.host_tokens = 0
        self.generated = 0

    @property
    def remaining(self) -> int:
        """Tokens still to be generated."""
        return len(self.request.completion) - self.generated
