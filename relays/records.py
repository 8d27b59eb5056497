"""What a mirror has to say, as records of `kv.events.<model>`; pure."""

from collections.abc import Iterator, Mapping, Sequence

from index.hashing import pack_hashes
from relays.cache.block_table import Node
from relays.cache.runs import Run, path_of
from relays.mirror import Mirror
from schemas.events import (
    BAND_BLOCKS,
    MAX_RECORD_BYTES,
    SCHEMA_VERSION,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    HolderCleared,
    ProfileChanged,
    Record,
)
from schemas.profiles import Holder, Profile

_MAX_BLOCKS = 32_768  # of one look at the mirror, which bounds the time that it takes
_MAX_BYTES = MAX_RECORD_BYTES * 9 // 10
_RUN_BYTES = 32  # an encoded run without its hashes


class Voice:
    """One holder's position in its own record stream: who speaks, in which life, with which sequence."""

    def __init__(self, holder: Holder, life: int) -> None:
        self.holder = holder
        self.life = life
        self.sequence = 0
        self._told_profile: Profile | None = None
        self._told_sequence: dict[str, int] = {}

    def speak(
        self,
        mirror: Mirror,
        engine_sequence: Mapping[str, int],
        engine_time_s: float,
    ) -> Iterator[Record]:
        """Yield the records that bring the index to the mirror's present state; none where nothing is new.

        Args:
            engine_sequence: source -> last sequence that the mirror has applied; only the last record carries it.
        """
        if mirror.profile == self._told_profile and not mirror.changed and engine_sequence == self._told_sequence:
            return
        while True:
            # whoever takes the records may let the mirror go on between two of them
            events: list[BlockEvent] = []
            if mirror.profile != self._told_profile:
                self._told_profile = mirror.profile
                events.append(ProfileChanged(mirror.profile))
            if mirror.take_cleared():
                events.append(HolderCleared())
            chunks = _chunks(mirror.take_runs(_MAX_BLOCKS))
            for number, chunk in enumerate(chunks):
                last = number == len(chunks) - 1 and not mirror.changed
                paths, run_events = _with_paths(chunk, with_names=mirror.profile.tells_engine_hashes)
                told = dict(engine_sequence) if last else {}
                self._told_sequence.update(told)
                yield self._record(paths, events + run_events, told, engine_time_s)
                events = []
            if not mirror.changed:
                return

    def beat(self, heartbeat: Heartbeat, engine_time_s: float) -> Record:
        """Return a heartbeat; it repeats the last sequence, for it takes none."""
        return self._frame((), (heartbeat,), {}, engine_time_s)

    def _record(
        self, paths: Sequence[bytes], events: Sequence[BlockEvent], told: dict[str, int], engine_time_s: float
    ) -> Record:
        self.sequence += 1
        return self._frame(paths, events, told, engine_time_s)

    def _frame(
        self, paths: Sequence[bytes], events: Sequence[BlockEvent], told: dict[str, int], engine_time_s: float
    ) -> Record:
        return Record(
            SCHEMA_VERSION,
            self.holder.name,
            self.holder.rank,
            self.life,
            self.sequence,
            told,
            engine_time_s,
            tuple(paths),
            tuple(events),
        )


def _chunks(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in parts that fit into one record each, whatever paths they share; at least one part."""
    chunks: list[list[Run]] = [[]]
    size = 0
    for run in runs:
        need = _RUN_BYTES + 8 * (2 * len(run.nodes) + run.head.depth % BAND_BLOCKS)
        if size + need > _MAX_BYTES and chunks[-1]:
            chunks.append([])
            size = 0
        chunks[-1].append(run)
        size += need
    return chunks


def _with_paths(runs: Sequence[Run], *, with_names: bool) -> tuple[list[bytes], list[BlockEvent]]:
    """Return the runs as events, with the paths that they share (deep ones first, so that most are shared)."""
    paths: list[bytes] = []
    path_through: dict[int, int] = {}  # hash of a block that a path goes through -> the path
    numbers: dict[int, int] = {}  # run position -> path
    for position in sorted(range(len(runs)), key=lambda n: -(runs[n].head.depth % BAND_BLOCKS)):
        head = runs[position].head
        if head.depth % BAND_BLOCKS == 0 or head.parent is None:
            numbers[position] = 0
            continue
        shared = path_through.get(head.parent.hash)
        if shared is None:
            hashes = path_of(head)
            shared = len(paths)
            paths.append(pack_hashes(hashes))
            for block_hash in hashes:
                path_through.setdefault(block_hash, shared)
        numbers[position] = shared
    events: list[BlockEvent] = []
    for position, run in enumerate(runs):
        blocks = pack_hashes(node.hash for node in run.nodes)
        if run.residency:
            names = pack_hashes(_low_bits(node) for node in run.nodes) if with_names else None
            events.append(BlocksStored(run.head.depth, numbers[position], blocks, run.residency, names))
        else:
            events.append(BlocksRemoved(run.head.depth, numbers[position], blocks))
    return paths, events


def _low_bits(node: Node) -> int:
    """Return the low 64 bits of what the engine calls a block, by which pools name it; 0 where it has no name."""
    for entry in node.entries:
        return entry.name if isinstance(entry.name, int) else int.from_bytes(entry.name[-8:], "big")
    return 0
