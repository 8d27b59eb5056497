"""Writes to a store in few words, and what a store answers in a form that compares."""

from collections.abc import Mapping, Sequence

from index.fold import BandRun, Flush, HolderWrite
from index.hashing import pack_hashes
from index.store import Applied, Found, Store
from schemas.events import BAND_BLOCKS, Heartbeat
from schemas.profiles import Holder, Profile
from tests.support.engines import HOLDER


def part(chain: Sequence[int], first: int = 0, last: int | None = None, residency: int = 1) -> list[BandRun]:
    """Return the blocks [first, last) of a chain as the fold cuts them: by band, each with its path."""
    last = len(chain) if last is None else last
    runs: list[BandRun] = []
    while first < last:
        band = first // BAND_BLOCKS * BAND_BLOCKS
        end = min(last, band + BAND_BLOCKS)
        runs.append(BandRun(first - band, pack_hashes(chain[band:end]), residency))
        first = end
    return runs


def write(
    *runs: Sequence[BandRun],
    sequence: int = 1,
    last: int | None = None,
    holder: Holder = HOLDER,
    life: int = 1,
    epoch: int = -1,
    told: Mapping[str, int] | None = None,
    profile: Profile | None = None,
    beat: Heartbeat | None = None,
) -> HolderWrite:
    """Return a write that covers the records from `sequence` to `last`."""
    flat = [run for some in runs for run in some]
    last = sequence if last is None else last
    return HolderWrite(holder, life, epoch, sequence, last, dict(told or {}), 0.0, flat, profile, beat)


def beat_of(beat: Heartbeat, sequence: int, holder: Holder = HOLDER, life: int = 1) -> HolderWrite:
    """Return a heartbeat alone, said after the record of that sequence."""
    return write(sequence=sequence + 1, last=sequence, holder=holder, life=life, beat=beat)


async def put(store: Store, model: str, *writes: HolderWrite) -> Applied:
    """Apply the writes in one flush without a cursor."""
    return await store.apply(Flush(model, None, list(writes)))


async def runs(store: Store, model: str, chain: Sequence[int], gap: int = 0) -> dict[str, list[tuple[int, int, int]]]:
    """Return holder -> (start, length, residency) of its runs along a chain."""
    found: Found = await store.find(model, pack_hashes(chain), gap=gap)
    return {
        str(holder): [(run.start, run.length, run.residency) for run in held] for holder, held in found.runs.items()
    }
