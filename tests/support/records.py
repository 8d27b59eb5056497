"""Records in few words."""

from collections.abc import Mapping, Sequence

from index.hashing import pack_hashes
from schemas.events import SCHEMA_VERSION, BlockEvent, BlocksRemoved, BlocksStored, Record
from schemas.profiles import Holder
from tests.support.engines import HOLDER


def record(
    *events: BlockEvent,
    sequence: int = 1,
    life: int = 1,
    holder: Holder = HOLDER,
    engine_sequence: Mapping[str, int] | None = None,
    paths: Sequence[Sequence[int]] = (),
    version: int = SCHEMA_VERSION,
) -> Record:
    """Return a record of these events."""
    packed = tuple(pack_hashes(path) for path in paths)
    told = dict(engine_sequence or {})
    return Record(version, holder.name, holder.rank, life, sequence, told, 0.5, packed, events)


def run(blocks: Sequence[int], depth: int = 0, residency: int = 1, path: int = 0) -> BlocksStored:
    """Return a run of blocks that are there now."""
    return BlocksStored(depth, path, pack_hashes(blocks), residency)


def gone(blocks: Sequence[int], depth: int = 0, path: int = 0) -> BlocksRemoved:
    """Return a run of blocks that are gone."""
    return BlocksRemoved(depth, path, pack_hashes(blocks))
