"""The rules of the conformance check: what was observed against what the given version sends; pure."""

from collections import Counter
from collections.abc import Callable

import msgspec

from ops.check.expected import Wire
from ops.check.observed import Observed
from ops.check.report import Finding
from relays.dialects import parse_version
from relays.engine import EngineRank
from relays.vllm import TIER_SPELLINGS
from schemas.vllm import SPEC_KINDS

_EVENTS = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
# told by other rules, or no defect of the stream
_ELSEWHERE = {"removal_unknown", "masked_unplaced", "expired", "silent_clear_proved", "namespace_hidden"}


class Seen(msgspec.Struct):
    """All that a check has of one source."""

    engine: str
    version: str
    wire: Wire | None
    observed: Observed
    rank: EngineRank
    replay_parts: Counter[int] = msgspec.field(default_factory=Counter)
    replay_ended: bool | None = None  # None: there is no replay endpoint
    engine_version: str | None = None  # what its API says


def check(seen: Seen) -> list[Finding]:
    """Return what each rule finds."""
    rules: tuple[Callable[[Seen], Finding | None], ...] = (
        _version,
        _encoding,
        _fields,
        _sequence,
        _replay,
        _events,
        _parents,
        _block_sizes,
        _groups,
        _hashes,
        _copies,
        _tiers,
    )
    return [finding for rule in rules if (finding := rule(seen)) is not None]


def _version(seen: Seen) -> Finding:
    given = f"{seen.engine} {seen.version}"
    if seen.engine_version is None:
        return Finding("version", "unseen", f"{given} was given; the engine was not asked")
    if seen.engine_version.startswith(seen.version):
        return Finding("version", "fit", f"{seen.engine_version}, as given")
    return Finding(
        "version",
        "unfit",
        f"{given} was given, the engine says {seen.engine_version}",
        f"--engine-version {seen.engine_version}",
    )


def _encoding(seen: Seen) -> Finding | None:
    found = seen.observed.encodings
    if seen.wire is None:
        return None
    if not found:
        return Finding("encoding", "unseen", "no event yet")
    other = {name: count for name, count in found.items() if name != seen.wire.encoding}
    if other:
        name = next(iter(other))
        return Finding(
            "encoding",
            "unfit",
            f"events are {name}s, {seen.engine} {seen.version} sends {seen.wire.encoding}s",
            "give the version that is running",
        )
    return Finding("encoding", "fit", f"{found[seen.wire.encoding]} events, all {seen.wire.encoding}s")


def _fields(seen: Seen) -> Finding | None:
    """Judge which fields there are: those of a later version mean that another one is running."""
    wire, observed = seen.wire, seen.observed
    if wire is None or not observed.encodings:
        return None
    number = parse_version(seen.version)
    unknown: list[str] = []
    later: list[str] = []
    for event, key in observed.keys:
        since = wire.fields.get(event, {}).get(key)
        if since is None and event in wire.fields:
            unknown.append(f"{event}.{key}")
        elif since is not None and since > number:
            later.append(f"{event}.{key} (since {'.'.join(map(str, since))})")
    for (event, length), count in observed.items.items():
        fewest, most = wire.items.get(event, (0, length))
        if not fewest <= length <= most:
            later.append(f"{event} of {length} items {count} times, not {fewest} to {most}")
    if later:
        return Finding("fields", "unfit", f"not of {seen.engine} {seen.version}: {', '.join(sorted(later))}")
    if unknown:
        return Finding("fields", "note", f"passed over, nobody here knows them: {', '.join(sorted(unknown))}")
    return Finding("fields", "fit", "all of this version")


def _sequence(seen: Seen) -> Finding:
    observed = seen.observed
    if not observed.messages:
        return Finding(
            "sequence",
            "unseen",
            "no message",
            "are events on (--kv-events-config), and is the topic a prefix of theirs?",
        )
    if observed.missing or observed.backwards:
        return Finding(
            "sequence",
            "unfit",
            f"{observed.first}..{observed.last}: {observed.missing} missing, {observed.backwards} times back",
        )
    return Finding("sequence", "fit", f"{observed.first}..{observed.last} without a hole")


def _replay(seen: Seen) -> Finding:
    if seen.replay_ended is None:
        return Finding(
            "replay", "note", "no replay endpoint: a gap costs the whole index of this replica", "replay_endpoint"
        )
    if not seen.replay_ended:
        return Finding("replay", "unfit", "no end mark came", "is replay_endpoint set, and is --replay its address?")
    parts = sum(seen.replay_parts.values())
    if not parts:
        return Finding("replay", "unseen", "answered; nothing was in the ring")
    wanted = seen.wire.replay_parts if seen.wire else None
    other = [count for count in seen.replay_parts if count != wanted]
    if wanted is not None and other:
        return Finding(
            "replay",
            "unfit",
            f"messages of {other[0]} parts, {seen.engine} {seen.version} sends {wanted}",
            "give the version that is running",
        )
    return Finding("replay", "fit", f"{parts} messages, then the end mark")


def _events(seen: Seen) -> Finding:
    observed = seen.observed
    unknown = sorted(set(observed.events) - _EVENTS)
    refused = {str(reason): count for reason, count in seen.rank.counts.items() if count}
    if seen.wire is not None and (unknown or observed.unreadable):
        return Finding("events", "unfit", f"unknown: {unknown}, unreadable messages: {observed.unreadable}")
    if refused:
        return Finding("events", "unfit", f"refused: {_counts(refused)}")
    if not observed.events:
        return Finding("events", "unseen", "none yet")
    return Finding("events", "fit", _counts(dict(observed.events)))


def _parents(seen: Seen) -> Finding:
    mirror = seen.rank.mirror
    unknown = mirror.counts["parent_unknown"]
    stored = seen.observed.events["BlockStored"]
    if not stored:
        return Finding("parents", "unseen", "no block was stored yet")
    partial = any(group.block_size > mirror.profile.alignment > 0 for group in mirror.profile.groups)
    if unknown and partial:
        return Finding("parents", "note", f"{unknown} partial blocks below a parent that is not announced")
    if unknown and seen.observed.first in (0, 1):
        return Finding("parents", "unfit", f"{unknown} blocks below a parent that was never announced")
    if unknown:
        return Finding(
            "parents", "note", f"{unknown} blocks below a parent announced before message {seen.observed.first}"
        )
    doubts = {reason: n for reason, n in mirror.counts.items() if n and reason not in _ELSEWHERE}
    if doubts:
        return Finding("parents", "note", f"earn nothing: {_counts(doubts)}")
    return Finding("parents", "fit", f"{mirror.nodes} blocks placed")


def _block_sizes(seen: Seen) -> Finding:
    found = {size for size in seen.observed.block_sizes if size}
    if not found:
        return Finding("block_size", "unseen", "none yet")
    unit = seen.rank.mirror.profile.unit
    off = sorted(size for size in found if unit and size % unit)
    if off:
        return Finding(
            "block_size", "unfit", f"{off} in events are no multiple of {unit}", "--set block_size or prefix_match_unit"
        )
    return Finding("block_size", "fit", f"{sorted(found)} tokens, index blocks of {unit}")


def _groups(seen: Seen) -> Finding:
    profile = seen.rank.mirror.profile
    unknown = sorted(set(seen.observed.kinds) - set(SPEC_KINDS)) if seen.engine == "vllm" else []
    if unknown:
        return Finding("groups", "note", f"no rule for {unknown}: predictions are an upper bound")
    if profile.upper_bound:
        return Finding("groups", "note", "the engine does not report every group: predictions are an upper bound")
    kinds = [f"{g.kind} {g.window or ''} of {g.block_size}".replace("  ", " ") for g in profile.groups]
    return Finding("groups", "fit" if kinds else "unseen", ", ".join(kinds) or "none yet")


def _hashes(seen: Seen) -> Finding:
    if not seen.observed.hashes:
        return Finding("hashes", "unseen", "none yet")
    hidden = seen.rank.mirror.counts["namespace_hidden"]
    if hidden:
        return Finding(
            "hashes",
            "note",
            f"{hidden} blocks whose engine hash shows a namespace that events do not tell",
            "is --set hash_seed the engine's PYTHONHASHSEED?",
        )
    return Finding("hashes", "fit", _counts(dict(seen.observed.hashes)))


def _copies(seen: Seen) -> Finding:
    """Report how often a removal names what nobody stored: with a whole history that is a wrong count of copies."""
    unknown = seen.rank.mirror.counts["removal_unknown"]
    if not seen.observed.events["BlockRemoved"]:
        return Finding("copies", "unseen", "nothing was removed yet")
    if unknown:
        return Finding("copies", "note", f"{unknown} removed blocks had no copy known here")
    return Finding("copies", "fit", f"{seen.observed.events['BlockRemoved']} removals, each of a known copy")


def _tiers(seen: Seen) -> Finding:
    found = set(seen.observed.mediums)
    if not found:
        return Finding("tiers", "unseen", "none yet")
    known = {str(name) for name in TIER_SPELLINGS} | {"CPU_PINNED", "EXTERNAL"}
    strange = sorted(found - known)
    if strange:
        return Finding("tiers", "unfit", f"nobody knows {strange}: counted as `other`, never as GPU")
    return Finding("tiers", "fit", ", ".join(sorted(found)))


def _counts(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(values.items()))
