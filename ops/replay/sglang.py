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
    cache = str(meta.get("cache_class"))
    unreported = [
        kind
        for kind, key, name in (("window", "sliding_window", "SWA"), ("state", "mamba_slots", "Mamba"))
        if key in meta or (name in cache and not cache.startswith("Pure"))
    ]
    return EngineSettings(
        block_size=meta.get("page_size") or 0,
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
        asked = sum(entry.get("op") in ("request", "probe") for entry in capture.log)
        return Score(capture=capture.name, excluded={"refused_version": asked})
    return None


async def replay_sglang(capture: Capture, stack: Pipeline | None = None) -> Score:
    """Return how the predictions of one recording compare, device and host apart.

    Args:
        stack: answers the predictions; the tables are compared in process in any case.

    Raises:
        ConfigError: an entry of the log lacks what its kind has.
    """
    return refused(capture) or await _Comparison(capture, stack).run()


def _check(capture: Capture) -> None:
    """Raise ConfigError, naming the entry, where the log lacks what the comparison needs."""
    for number, entry in enumerate(capture.log, start=1):
        asked = {"name", "tokens", "match"} if entry.get("op") in ("request", "probe") else set()
        missing = {"op", "after_frame", *asked} - entry.keys()
        if missing:
            raise ConfigError(f"{capture.name}: log entry {number}: without {', '.join(sorted(missing))}")


class _Comparison:
    def __init__(self, capture: Capture, stack: Pipeline | None) -> None:
        _check(capture)
        self._capture = capture
        self._profile = profile_of(capture)
        # which tier a page is in is not known: device and host are compared together
        self._tiers_known = "tier_uncertain" not in self._profile.marks
        self._score = Score(capture=capture.name)
        self._here = InProcess(self._profile, capture.rank)
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
                if frame.message is None:
                    continue  # no subscriber can read it either
                await self._here.take(*frame.message)
                if self._stack is not None:
                    await self._stack.take(*frame.message)
        return [frame for frame in frames if frame.number >= until]

    async def _ask(self, entry: Mapping[str, Any]) -> None:
        salt, adapter, known = self._namespace(entry)
        prompt = _prompt(self._profile.model, entry["tokens"], salt, adapter)
        if not known or self._shares_hidden(entry, prompt):
            self._score.exclude("namespace_not_in_events")
        else:
            reach = await self._answering.predict(prompt, whole_prompt=True)
            delivered = {tier: entry["match"].get(key, 0) for key, tier in (("device", "gpu"), ("host", "host"))}
            what, predicted = f"{entry['op']} {entry['name']}", _told(reach.by_tier)
            if self._tiers_known:
                self._score.compare_tiers(what, predicted, delivered)
            else:
                self._score.compare(what, sum(predicted.values()), sum(delivered.values()))
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
        what = f"cache {entry.get('label', '')}"
        truth = {
            tier: {normalize_hash(value, 64) for value in entry.get(medium) or ()} for medium, tier in _MEDIA.items()
        }
        found = {tier: {name for _, name in self._here.engine.mirror.engine_table(tier)} for tier in _MEDIA.values()}
        if not self._tiers_known:
            self._score.compare_state(what, truth["gpu"] | truth["host"] == found["gpu"] | found["host"])
            return
        self._score.compare_state(what, truth["gpu"] == found["gpu"])
        if "CPU_PINNED" in entry:
            self._score.compare_state(what, truth["host"] == found["host"], host=True)


def _told(by_tier: Mapping[Tier, int]) -> dict[str, int]:
    return {tier: by_tier.get(tier, 0) for tier in ("gpu", "host")}


def _prompt(model: str, tokens: Sequence[int], salt: str | None, adapter: str | None) -> Prompt:
    return Prompt(model=model, prompt_tokens=len(tokens), tokens=pack_tokens(tokens), adapter=adapter, salt=salt)
