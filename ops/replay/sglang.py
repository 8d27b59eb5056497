"""SGLang recordings: their profile, and their truth at each line of the log."""

from collections.abc import Mapping, Sequence
from typing import Any

from index.hashing import pack_tokens, unpack_hashes
from index.lookup import Prompt, chain_of
from ops.replay.capture import MODEL, Capture, Frame
from ops.replay.pipeline import InProcess, Pipeline
from ops.replay.score import Score
from relays.dialects import EngineSettings, sglang_profile
from relays.engine_events import normalize_hash
from schemas.errors import ConfigError
from schemas.profiles import Profile, Tier

_MEDIA: dict[str, Tier] = {"GPU": "gpu", "CPU_PINNED": "host"}


def settings_of(capture: Capture) -> EngineSettings:
    """Return what an operator of this engine would have set."""
    meta = capture.meta
    unreported = [kind for kind, key in (("window", "sliding_window"), ("state", "mamba_slots")) if key in meta]
    return EngineSettings(
        block_size=meta["page_size"],
        drafting="eagle" if meta.get("is_eagle") else "none",
        hicache="hicache_write_policy" in meta,
        unreported=tuple(unreported),  # type: ignore[arg-type]  # the two literals above
    )


def profile_of(capture: Capture) -> Profile:
    """Return the profile that an operator of this engine would have configured."""
    return sglang_profile(MODEL, capture.name, capture.version, settings_of(capture))


def refused(capture: Capture) -> Score | None:
    """Return the score of a recording whose version is refused, or None."""
    try:
        profile_of(capture)
    except ConfigError:
        asked = sum(entry["op"] in ("request", "probe") for entry in capture.log)
        return Score(capture=capture.name, excluded={"refused_version": asked})
    return None


async def replay_sglang(capture: Capture, stack: Pipeline | None = None) -> Score:
    """Return how the predictions of one recording compare, device and host apart.

    Args:
        stack: answers the predictions; the tables are compared in process in any case.
    """
    score = Score(capture=capture.name)
    return refused(capture) or await _Comparison(capture, profile_of(capture), score, stack).run()


class _Comparison:
    def __init__(self, capture: Capture, profile: Profile, score: Score, stack: Pipeline | None) -> None:
        self._capture = capture
        self._profile = profile
        self._score = score
        self._here = InProcess(profile, capture.meta.get("publisher_rank", 0))
        self._stack = stack
        self._answering: Pipeline = stack or self._here
        self._hidden: list[Mapping[str, Any]] = []  # entries so far whose namespace no event tells

    async def run(self) -> Score:
        frames = list(self._capture.published)
        for number, entry in enumerate(self._capture.log):
            # a request's match was taken before its own frames, which lie before its line
            before = self._capture.log[number - 1]["after_frame"] if number else 0
            if entry["op"] == "request":
                frames = await self._take(frames, before)
                await self._ask(entry)
            frames = await self._take(frames, entry["after_frame"])
            if entry["op"] == "probe":
                await self._ask(entry)
            elif entry["op"] == "cache":
                self._compare_tables(entry)
        return self._score

    async def _take(self, frames: list[Frame], until: int) -> list[Frame]:
        """Take the frames recorded before `until`; return the others."""
        for frame in frames:
            if frame.number < until:
                sequence = int.from_bytes(frame.parts[1], "big")
                await self._here.take(sequence, frame.parts[2])
                if self._stack is not None:
                    await self._stack.take(sequence, frame.parts[2])
        return [frame for frame in frames if frame.number >= until]

    async def _ask(self, entry: Mapping[str, Any]) -> None:
        salt, adapter, known = self._namespace(entry)
        prompt = _prompt(self._profile.model, entry["tokens"], salt, adapter)
        if not known or self._shares_hidden(entry, prompt):
            self._score.exclude("namespace_not_in_events")
        else:
            reach = await self._answering.predict(prompt, whole_prompt=True)
            delivered = {tier: entry["match"][key] for key, tier in (("device", "gpu"), ("host", "host"))}
            self._score.compare_tiers(f"{entry['op']} {entry['name']}", _told(reach.by_tier), delivered)
            self._score.marked += reach.upper_bound
        if not known:
            self._hidden.append(entry)

    def _namespace(self, entry: Mapping[str, Any]) -> tuple[str | None, str | None, bool]:
        """Return (salt, adapter) and whether this version's events tell them; an extra key is never told."""
        salt, extra_key = entry.get("salt"), entry.get("extra_key")
        adapter = None
        lora = self._capture.meta.get("lora") or {}
        if extra_key is not None and extra_key == lora.get("lora_id"):
            adapter, extra_key = lora["lora_name"], None
        hidden = self._profile.hidden_namespaces
        known = extra_key is None
        known &= salt is None or "salt" not in hidden
        known &= adapter is None or "adapter" not in hidden
        return salt, adapter, known

    def _shares_hidden(self, entry: Mapping[str, Any], prompt: Prompt) -> bool:
        """Return whether blocks of an untold namespace cannot be told from this prompt's."""
        pairs = self._profile.drafting == "pairs"
        chain = unpack_hashes(chain_of(prompt, self._profile.unit, pairs=pairs, secret=b"") or b"")
        if self._here.engine.mirror.is_ambiguous(chain):
            return True
        first = self._profile.unit + pairs
        return (entry.get("salt"), prompt.adapter) == (None, None) and any(
            entry["tokens"][:first] == other["tokens"][:first] for other in self._hidden
        )

    def _compare_tables(self, entry: Mapping[str, Any]) -> None:
        for medium, tier in _MEDIA.items():
            if medium not in entry and tier == "host":
                continue
            truth = {normalize_hash(value, 64) for value in entry.get(medium) or ()}
            found = {name for _, name in self._here.engine.mirror.engine_table(tier)}
            self._score.compare_state(f"cache {entry.get('label', '')}", truth == found, host=tier == "host")


def _told(by_tier: Mapping[Tier, int]) -> dict[str, int]:
    return {tier: by_tier.get(tier, 0) for tier in ("gpu", "host")}


def _prompt(model: str, tokens: Sequence[int], salt: str | None, adapter: str | None) -> Prompt:
    return Prompt(model=model, prompt_tokens=len(tokens), tokens=pack_tokens(tokens), adapter=adapter, salt=salt)
