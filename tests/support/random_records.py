"""Records of every kind for hypothesis, and legal streams of one life after another."""

from hypothesis import strategies as st

from schemas.events import (
    SCHEMA_VERSION,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    HolderCleared,
    ProfileChanged,
    Record,
)
from schemas.profiles import Group, HashScheme, Pair, Profile, TierProfile
from tests.support.engines import FULL

names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
numbers = st.integers(0, (1 << 53) - 1)
sequences = st.dictionaries(names, numbers, max_size=3)
times = st.floats(0, 1e10)


def packed(min_blocks: int, max_blocks: int) -> st.SearchStrategy[bytes]:
    """Return packed u64 hashes."""
    return st.integers(min_blocks, max_blocks).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n))


groups = st.builds(Group, st.integers(0, 63), st.just("full"), st.integers(1, 128).map(lambda units: 4 * units))
tiers = st.builds(
    TierProfile,
    st.sampled_from(["gpu", "host", "disk", "pool", "other"]),
    st.integers(1, 8),
    st.none() | st.integers(0, 1 << 40),
    st.booleans(),
    st.sampled_from(["never", "uncounted", "counted"]),
)
profiles: st.SearchStrategy[Profile] = st.builds(
    Profile,
    model=names,
    name=names,
    engine=names,
    version=names,
    dialect=names,
    unit=st.sampled_from([0, 1, 2, 4]),
    alignment=st.integers(0, 1024),
    groups=st.lists(groups, max_size=3).map(tuple),
    pairs=st.lists(st.builds(Pair, st.just(FULL), st.sampled_from(["gpu", "host"])), max_size=2).map(tuple),
    tiers=st.lists(tiers, min_size=1, max_size=3).map(tuple),
    hash=st.builds(HashScheme, names, st.none() | names, st.sampled_from([64, 256])),
    adapters=st.dictionaries(names, names, max_size=2),
    upper_bound=st.booleans(),
)
heartbeats = st.builds(
    Heartbeat, st.sampled_from(["live", "catching_up", "stale", "silent", "gone"]), sequences, st.floats(0, 1), names
)


@st.composite
def events(draw: st.DrawFn, paths: tuple[bytes, ...]) -> BlockEvent:
    """Draw one event whose path is among the record's."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return HolderCleared()
    if kind == 1:
        return draw(heartbeats)
    if kind == 2:
        return ProfileChanged(draw(profiles))
    path = draw(st.integers(0, max(0, len(paths) - 1)))
    inside = draw(st.integers(0, len(paths[path]) // 8 if paths else 0))
    depth = draw(st.integers(0, (1 << 24) - 1)) * 128 + inside
    blocks = draw(packed(1, 5))
    if kind == 3:
        return BlocksRemoved(depth, path, blocks)
    return BlocksStored(depth, path, blocks, draw(st.integers(1, (1 << 16) - 1)))


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Draw any record that a relay may write."""
    paths = tuple(draw(st.lists(packed(1, 4), max_size=3)))
    return Record(
        SCHEMA_VERSION,
        draw(names),
        draw(st.none() | st.integers(0, (1 << 16) - 1)),
        draw(numbers),
        draw(numbers),
        draw(sequences),
        draw(times),
        paths,
        tuple(draw(st.lists(events(paths), max_size=4))),
    )
