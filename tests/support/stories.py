"""Stories of an engine's cache for hypothesis: stores, removals and clears over a small tree of prompts.

A prompt is a text of zeros and ones, one character a block of four tokens; its blocks are its prefixes. Four groups:
0 full, 1 and 3 windows of one class (blocks of four), 2 state (blocks of eight, so every second prefix).
"""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from relays.engine_events import Cleared, EngineEvent, Moved, Removed, Stored
from schemas.profiles import Group, Pair, Profile, Tier
from tests.support.engines import profile

GROUPS = (Group(0, "full", 4), Group(1, "window", 4, 9), Group(2, "state", 8), Group(3, "window", 4, 9))
TIERS: tuple[Tier, ...] = ("gpu", "host")
TRUNK = "01" * 62  # brings the branches near the end of a band of 128 blocks

# small trees at depth 0 and around the first band's end
prompts = st.builds(
    lambda trunk, branch: trunk + branch,
    st.sampled_from(["", "", "", TRUNK]),
    st.text("01", min_size=1, max_size=7),
)


def configured(**changes: Any) -> Profile:
    """Return the profile with all groups and pairs known beforehand."""
    every = tuple(Pair(group.group_class, tier) for group in GROUPS[:3] for tier in TIERS)
    return profile(*GROUPS, pairs=every, **changes)


def name(prefix: str, alias: int = 0) -> int:
    """Return what the engine calls the block that ends a prefix; another alias is another name of it."""
    return xxh3_64_intdigest(prefix.encode(), alias)


def token_ids(prompt: str) -> list[int]:
    """Return a prompt's tokens."""
    return [token for mark in prompt for token in (int(mark), 7, 7, 7)]


def store(prompt: str, first: int, group: int = 0, tier: Tier = "gpu", alias: int = 0, **fields: Any) -> Stored:
    """Return the store of a prompt's blocks from the `first` unit on, as the engine announces it for a group."""
    units = GROUPS[group].block_size // 4
    last = len(prompt) // units * units
    first = min(first // units * units, last)
    fields.setdefault("group_spec", GROUPS[group])
    return Stored(
        hashes=tuple(name(prompt[:end], alias) for end in range(first + units, last + 1, units)),
        parent=name(prompt[:first], alias) if first else None,
        tokens=token_ids(prompt[first:last]),
        block_size=units * 4,
        group=group,
        tier=tier,
        **fields,
    )


def removals(event: Stored) -> list[Removed]:
    """Return one removal for each copy that a store announced."""
    return [Removed(hashes=(block,), tier=event.tier, group=event.group) for block in event.hashes]


def starts(prompt: str) -> st.SearchStrategy[int]:
    """Return where a store of a prompt may begin: at its start, or near its end."""
    return st.sampled_from([0, *range(max(1, len(prompt) - 7), len(prompt))])


@st.composite
def honest_stores(draw: st.DrawFn) -> Stored:
    """Draw a store of a real prompt, in any group and tier."""
    prompt = draw(prompts)
    group, tier = draw(st.sampled_from([0, 0, 1, 2, 3])), draw(st.sampled_from(TIERS))
    return store(prompt, draw(starts(prompt)), group, tier)


@st.composite
def masked_stores(draw: st.DrawFn) -> Stored:
    """Draw a store that leaves out some of its range's blocks."""
    event = draw(honest_stores())
    kept = draw(st.lists(st.sampled_from(event.hashes), unique=True, max_size=2)) if event.hashes else []
    whole = [block for block in event.hashes if block in kept]
    return Stored(
        hashes=tuple(whole),
        parent=event.parent,
        tokens=event.tokens,
        block_size=event.block_size,
        group=event.group,
        tier=event.tier,
        group_spec=event.group_spec,
    )


@st.composite
def confused_stores(draw: st.DrawFn) -> Stored:
    """Draw a store whose names, parent or namespace contradict others: aliases, strangers, unknown adapters."""
    prompt = draw(prompts)
    alias = draw(st.integers(1, 2))
    event = store(prompt, draw(starts(prompt)), tier=draw(st.sampled_from(TIERS)), alias=alias)
    hashes = event.hashes
    if draw(st.booleans()) and hashes:  # the engine's name of quite another block
        hashes = (name(draw(prompts)), *hashes[1:])
    return Stored(
        hashes=hashes,
        parent=draw(st.sampled_from([event.parent, 12345])) if event.parent is not None else None,
        tokens=event.tokens,
        block_size=4,
        tier=event.tier,
        group_spec=event.group_spec,
        salt=draw(st.sampled_from([None, "t"])) if event.parent is None else None,
        namespace_known=draw(st.integers(0, 5)) > 0,
    )


@st.composite
def hash_only_stores(draw: st.DrawFn) -> Stored:
    """Draw a host store that names blocks and nothing else."""
    names = draw(st.lists(st.builds(name, prompts), min_size=1, max_size=3))
    return Stored(hashes=tuple(names), tier="host", group=draw(st.sampled_from([0, 1])))


@st.composite
def any_removals(draw: st.DrawFn) -> Removed:
    """Draw a removal of blocks that may be there or not."""
    names = draw(st.lists(st.builds(name, prompts, st.integers(0, 2)), min_size=1, max_size=4))
    return Removed(hashes=tuple(names), tier=draw(st.sampled_from(TIERS)), group=draw(st.integers(0, 3)))


@st.composite
def moves(draw: st.DrawFn) -> Moved:
    """Draw a move of blocks that may be there or not."""
    names = draw(st.lists(st.builds(name, prompts), min_size=1, max_size=3))
    before, after = draw(st.permutations(TIERS))
    return Moved(hashes=tuple(names), before=before, tier=after, group=draw(st.integers(0, 3)))


clears = st.builds(Cleared, tier=st.sampled_from([None, None, "gpu", "host"]))
events: st.SearchStrategy[EngineEvent] = st.one_of(
    honest_stores(),
    honest_stores(),
    any_removals(),
    masked_stores(),
    hash_only_stores(),
    confused_stores(),
    moves(),
)


@st.composite
def stories(draw: st.DrawFn) -> list[list[EngineEvent]]:
    """Draw batches of events; some take back blocks that were really stored, and now and then there is a clear."""
    batches: list[list[EngineEvent]] = []
    told: list[Stored] = []
    for _ in range(draw(st.integers(1, 12))):
        batch: list[EngineEvent] = []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.integers(0, 9))
            if kind == 0:
                batch.append(draw(clears))
            elif kind < 4 and told:
                undone = removals(draw(st.sampled_from(told)))
                batch += undone if draw(st.booleans()) else undone[::-1]
            else:
                batch.append(draw(events))
        told += [event for event in batch if isinstance(event, Stored)]
        batches.append(batch)
    return batches


def flat(batches: Sequence[Sequence[EngineEvent]]) -> list[EngineEvent]:
    """Return all events in order."""
    return [event for batch in batches for event in batch]
