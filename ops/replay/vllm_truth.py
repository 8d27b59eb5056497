"""Compare a vLLM recording, step by step: each prediction before the step, each table after it."""

from collections.abc import Sequence
from contextlib import suppress

from index.hashing import pack_tokens, unpack_hashes
from index.lookup import Prompt, chain_of
from ops.replay.capture import Capture, Frame
from ops.replay.pipeline import InProcess, Pipeline
from ops.replay.score import Score
from ops.replay.vllm import Request, Step, profile_of, steps_of, table_digest
from relays.dialects import parse_version, places_media
from relays.engine_events import Cleared, Removed, Stored
from schemas.errors import ConfigError, FrameError
from schemas.profiles import Tier


def refused(capture: Capture) -> Score | None:
    """Return the score of a recording whose version is refused, or None."""
    try:
        profile_of(capture)
    except ConfigError:
        asked = sum(len(step.requests) for step in steps_of(capture))
        return Score(capture=capture.name, excluded={"refused_version": asked})
    return None


async def replay_vllm(capture: Capture, stack: Pipeline | None = None) -> Score:
    """Return how the predictions of one recording compare.

    Args:
        stack: answers the predictions; the tables are compared in process in any case.
    """
    return refused(capture) or await _Comparison(capture, stack).run(steps_of(capture))


class _Comparison:
    def __init__(self, capture: Capture, stack: Pipeline | None) -> None:
        profile = profile_of(capture)
        self._profile = profile
        self._score = Score(capture=capture.name)
        self._here = InProcess(profile, capture.rank)
        self._told = InProcess(profile, capture.rank)  # the same, but told of every clear when it happened
        self._answering: Pipeline = stack or self._here
        self._stack = stack
        self._silent_clear = False  # the host was cleared without an event, and nothing proves it yet
        self._table: dict[Tier, str] = {}

    async def run(self, steps: Sequence[Step]) -> Score:
        for step in steps:
            for reset in step.resets:
                self._reset(reset)
            await self._requests(step)
            for frame in step.frames:
                await self._take(frame)
            if step.frames:
                self._table = {}
            if step.truth is not None:
                self._compare_tables(step)
        return self._score

    def _reset(self, arguments: dict[str, object]) -> None:
        """Tell the second mirror what the engine just did and has not announced.

        Up to 0.21 OffloadingConnector has no `reset_cache` and keeps its blocks (v1/offloading_connector.py).
        """
        reaches_host = bool(arguments.get("reset_connector")) and parse_version(self._profile.version) >= (0, 22)
        tiers: tuple[Tier, ...] = ("gpu", "host") if reaches_host else ("gpu",)
        self._told.engine.mirror.apply([Cleared(tier=tier) for tier in tiers])
        if reaches_host and self._profile.clear_scope == "device":
            self._silent_clear = True

    async def _take(self, frame: Frame) -> None:
        if frame.message is None:
            return  # no subscriber can read it either
        proofs = self._here.engine.mirror.counts["silent_clear_proved"]
        await self._here.take(*frame.message)
        await self._told.take(*frame.message)
        if self._stack is not None:
            await self._stack.take(*frame.message)
        if self._here.engine.mirror.counts["silent_clear_proved"] > proofs:
            self._silent_clear = False

    async def _requests(self, step: Step) -> None:
        for position, request in enumerate(step.requests):
            cause = await self._compare(step, request, step.requests[:position])
            if cause is not None:
                self._score.exclude(cause)

    async def _compare(self, step: Step, request: Request, earlier: Sequence[Request]) -> str | None:
        """Compare one request, or return why nobody could have known."""
        if request.unknowable is not None:
            return request.unknowable
        if request.tokens is None:
            return "prompt_not_in_log"
        prompt = _prompt(request, self._profile.model)
        chain = self._chain(prompt)
        if self._namespace_hidden(step, request, chain):
            return "namespace_not_in_events"
        predicted = (await self._answering.predict(prompt)).tokens
        if (await self._told.predict(prompt)).tokens != (await self._here.predict(prompt)).tokens:
            return "queued_clear"
        if self._same_step(step, request, earlier, predicted, chain):
            return "same_step"
        if await self._unannounced(request, prompt, chain, predicted):
            return "tokens_never_announced"
        self._score.compare(f"step {step.number} {request.rid}", predicted, request.delivered_tokens)
        return None

    def _chain(self, prompt: Prompt) -> list[int]:
        unit = self._here.engine.mirror.profile.unit
        return unpack_hashes(chain_of(prompt, unit, pairs=False, secret=b"") or b"")

    def _namespace_hidden(self, step: Step, request: Request, chain: Sequence[int]) -> bool:
        """Return whether the request's namespace is one that this version's events do not tell.

        A salt up to 0.16; a picture, or where in a block it begins, up to 0.18; an adapter's path where two engine
        hashes claim one of the prompt's blocks, or where this very step announces another hash for one.
        """
        mirror = self._here.engine.mirror
        hidden = self._profile.hidden_namespaces
        if request.salt is not None and "salt" in hidden:
            return True
        if request.media and not places_media(self._profile.version):
            return True
        if mirror.is_ambiguous(chain):
            return True
        if request.adapter is None or "adapter_path" not in hidden:
            return False
        return any(
            mirror.contradicts(event) for event in self._events(step) if isinstance(event, Stored) and event.adapter
        )

    def _same_step(
        self, step: Step, request: Request, earlier: Sequence[Request], predicted: int, chain: Sequence[int]
    ) -> bool:
        """Return whether this step itself changed what the request met."""
        block = max((group.block_size for group in self._here.engine.mirror.profile.groups), default=1)
        end = predicted + block
        tokens = request.tokens or ()
        if len(tokens) >= end and any(
            (other.tokens or ())[:end] == tokens[:end] and other.namespace == request.namespace for other in earlier
        ):
            return True
        unit = self._here.engine.mirror.profile.unit or 1
        inside = set(chain[: predicted // unit])
        removed = [name for event in self._events(step) if isinstance(event, Removed) for name in event.hashes]
        return bool(inside & self._here.engine.mirror.places(removed))

    async def _unannounced(self, request: Request, prompt: Prompt, chain: Sequence[int], predicted: int) -> bool:
        """Return whether a resident block whose tokens were never told could lengthen this hit."""
        mirror = self._here.engine.mirror
        unit = mirror.profile.unit
        tokens = request.tokens or ()
        for _, stored in mirror.unplaced():
            size = stored.block_size
            for end in range(predicted // unit * unit + unit, len(tokens), unit):
                if end >= size and tuple(stored.tokens[-size:]) == tokens[end - size : end]:
                    return True
        return False

    def _events(self, step: Step) -> list[object]:
        events: list[object] = []
        for frame in step.frames:
            if frame.message is None:
                continue
            with suppress(FrameError):
                events += self._here.engine.decode(*frame.message).events
        return events

    def _compare_tables(self, step: Step) -> None:
        truth = step.truth or {}
        if "digest" in truth:
            self._score.compare_state(f"step {step.number}", self._digest("gpu") == truth["digest"])
        if "host_digest" in truth:
            if self._silent_clear:
                self._score.exclude("silent_host_clear")
            else:
                self._score.compare_state(
                    f"step {step.number}", self._digest("host") == truth["host_digest"], host=True
                )

    def _digest(self, tier: Tier) -> str:
        if tier not in self._table:
            self._table[tier] = table_digest(self._here.engine.mirror.engine_table(tier))
        return self._table[tier]


def _prompt(request: Request, model: str) -> Prompt:
    assert request.tokens is not None
    return Prompt(
        model=model,
        prompt_tokens=len(request.tokens),
        tokens=pack_tokens(request.tokens),
        adapter=request.adapter,
        salt=request.salt,
        media=request.media,
    )
