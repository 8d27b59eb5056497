"""vLLM recordings: their profile, and their truth step by step."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from index.hashing import Media
from ops.replay.capture import MODEL, Capture, Frame
from ops.replay.vllm_meta import settings_of
from relays.dialects import vllm_profile
from relays.engine_events import EngineHash
from schemas.errors import ConfigError
from schemas.profiles import Profile


class Request(msgspec.Struct):
    """One prompt that the engine scheduled, and what it then reused."""

    rid: str
    step: int
    tokens: tuple[int, ...] | None  # None: given as embeddings
    delivered_tokens: int
    salt: str | None = None
    adapter: str | None = None
    media: tuple[Media, ...] = ()
    unknowable: str | None = None  # why what it met cannot be told from the recording

    @property
    def namespace(self) -> tuple[object, ...]:
        """Return what must be equal beside the tokens."""
        return (self.salt, self.adapter, self.media)


class Step(msgspec.Struct):
    """One engine step: what happened before it, who was scheduled in it, what it published, what was true after."""

    number: int
    resets: list[dict[str, Any]] = []  # accepted resets before this step, with their arguments
    requests: list[Request] = []  # in the order decided
    frames: list[Frame] = []
    truth: dict[str, Any] | None = None  # the `step` entry


def steps_of(capture: Capture) -> list[Step]:
    """Return the recording's steps in order.

    Raises:
        ConfigError: an entry of the log lacks what its kind has; the message names the entry.
    """
    log = _Log()
    for number, entry in enumerate(capture.log, start=1):
        try:
            log.read(entry)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{capture.name}: log entry {number}: {error!r}") from error
    steps = log.steps
    for request in log.requests.values():
        log.step(request.step).requests.append(request)
    for frame in capture.published:
        log.step(frame.step).frames.append(frame)
    return [steps[number] for number in sorted(steps)]


def profile_of(capture: Capture) -> Profile:
    """Return the profile that an operator of this engine would have configured."""
    return vllm_profile(MODEL, capture.name, capture.version, settings_of(capture))


def table_digest(table: Iterable[tuple[int, EngineHash]]) -> str:
    """Return the digest that the recordings log of an engine's table: distinct (group, hash) pairs."""
    lines = sorted(f"{group}:{name if isinstance(name, int) else name.hex()}" for group, name in set(table))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class _Log:
    """What the entries so far say; kinds that are not known are passed over."""

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.requests: dict[str, Request] = {}
        self._submits: dict[str, dict[str, Any]] = {}
        self._media: dict[str, dict[str, Any]] = {}
        self._resets: list[dict[str, Any]] = []

    def step(self, number: int) -> Step:
        return self.steps.setdefault(number, Step(number))

    def read(self, entry: dict[str, Any]) -> None:
        match entry.get("ev"):
            case "submit":
                self._submits[entry["rid"]] = entry
            case "mm":
                self._media[entry["rid"]] = entry
            case "reset_prefix_cache" if entry.get("returned"):
                self._resets.append(entry.get("kw") or {})
            case "scheduled":
                rid = entry["rid"]
                self.requests.pop(rid, None)  # the last decision counts, in its own order
                self.requests[rid] = _request(entry, self._submits.get(rid, {}), self._media.get(rid))
                self._take_resets(entry["step"])
            case "step":
                self.step(entry["n"]).truth = entry
                self._take_resets(entry["n"])

    def _take_resets(self, step: int) -> None:
        if self._resets:
            self.step(step).resets += self._resets
            self._resets = []


def _request(scheduled: dict[str, Any], submit: dict[str, Any], media: dict[str, Any] | None) -> Request:
    tokens: Sequence[int] | None = submit.get("prompt_token_ids")
    spans: tuple[Media, ...] = ()
    if media is not None:
        tokens = media["expanded_token_ids"]
        spans = tuple(Media(f["identifier"], f["offset"], f["length"]) for f in media["features"])
    adapter = submit.get("lora") or {}
    return Request(
        rid=scheduled["rid"],
        step=scheduled["step"],
        tokens=None if tokens is None else tuple(tokens),
        delivered_tokens=scheduled["num_cached_tokens"],
        salt=submit.get("cache_salt"),
        adapter=adapter.get("name"),
        media=spans,
        unknowable=scheduled.get("unknowable"),
    )
