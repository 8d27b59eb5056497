"""The fold: records into writes, cut at bands and parted at epochs."""

from index.fold import BandRun, HolderWrite, fold
from index.hashing import pack_hashes
from schemas.events import Heartbeat, HolderCleared, ProfileChanged
from schemas.profiles import Holder
from tests.support.engines import HOLDER, profile
from tests.support.records import gone, record, run

ALIVE = Heartbeat("live", {"0": 7})


def spans(write: HolderWrite) -> list[tuple[int, int, int]]:
    """Return (position in the band, blocks, residency) of the write's runs."""
    return [(part.first, len(part.chain) // 8 - part.first, part.residency) for part in write.runs]


def test_a_run_is_cut_at_every_multiple_of_128() -> None:
    """A run of 300 blocks from depth 0 becomes one part in each of three bands."""
    blocks = list(range(1, 301))
    (write,) = fold([record(run(blocks))])
    assert write.runs == [
        BandRun(0, pack_hashes(blocks[:128]), 1),
        BandRun(0, pack_hashes(blocks[128:256]), 1),
        BandRun(0, pack_hashes(blocks[256:]), 1),
    ]


def test_a_run_that_starts_inside_a_band_brings_its_path() -> None:
    """The part in the run's first band begins with the path, the parts after it need none."""
    path = list(range(1, 127))
    (write,) = fold([record(run([1000, 1001, 1002], depth=128 * 5 + 126), paths=[path])])
    assert write.runs == [BandRun(126, pack_hashes([*path, 1000, 1001]), 1), BandRun(0, pack_hashes([1002]), 1)]


def test_a_shared_path_is_cut_to_what_leads_to_the_run() -> None:
    """Two runs may name one path; each takes as many of its hashes as its own depth says."""
    (write,) = fold([record(run([9], depth=1), run([8], depth=3), paths=[[1, 2, 3]])])
    assert write.runs == [BandRun(1, pack_hashes([1, 9]), 1), BandRun(3, pack_hashes([1, 2, 3, 8]), 1)]


def test_a_removal_is_residency_zero() -> None:
    """Blocks that are gone are written as a run without any bit."""
    (write,) = fold([record(gone([1, 2]))])
    assert spans(write) == [(0, 2, 0)]


def test_consecutive_records_of_a_holder_are_one_write() -> None:
    """Sequences that follow each other are joined, the last engine sequence and time winning."""
    (write,) = fold(
        [
            record(run([1]), sequence=4, engine_sequence={"0": 10}),
            record(run([2]), sequence=5, engine_sequence={"0": 11, "1": 3}),
        ]
    )
    assert (write.first_sequence, write.last_sequence, write.epoch) == (4, 5, -1)
    assert write.engine_sequence == {"0": 11, "1": 3}


def test_holders_are_kept_apart() -> None:
    """Interleaved records of two holders give one write each."""
    other = Holder("r", 1)
    writes = fold(
        [
            record(run([1]), sequence=1),
            record(run([2]), sequence=1, holder=other),
            record(run([3]), sequence=2),
        ]
    )
    assert [(write.holder, write.last_sequence) for write in writes] == [(HOLDER, 2), (other, 1)]


def test_a_hole_in_the_sequence_begins_a_write() -> None:
    """A record that does not follow stands alone, so that the store sees the gap."""
    writes = fold([record(run([1]), sequence=1), record(run([2]), sequence=3)])
    assert [(write.first_sequence, write.last_sequence) for write in writes] == [(1, 1), (3, 3)]


def test_a_new_life_begins_a_write_of_an_unknown_epoch() -> None:
    """A higher life is a write of its own, whose epoch the store knows to be its first."""
    writes = fold([record(run([1]), sequence=9), record(run([2]), sequence=1, life=2)])
    assert [(write.life, write.epoch, write.first_sequence) for write in writes] == [(1, -1, 9), (2, -1, 1)]


def test_a_clear_begins_an_epoch_named_by_its_sequence() -> None:
    """The record that clears begins a write whose epoch is its sequence, and later records of the life stay in it."""
    writes = fold(
        [
            record(run([1]), sequence=1),
            record(HolderCleared(), run([2]), sequence=2),
            record(run([3]), sequence=3),
            record(run([4]), sequence=5),
        ]
    )
    assert [(write.epoch, write.first_sequence, write.last_sequence) for write in writes] == [
        (-1, 1, 1),
        (2, 2, 3),
        (2, 5, 5),
    ]


def test_a_heartbeat_takes_no_sequence() -> None:
    """A heartbeat alone covers no record, and the record after it follows without a gap."""
    (write,) = fold([record(ALIVE, sequence=7), record(run([1]), sequence=8)])
    assert (write.first_sequence, write.last_sequence, write.heartbeat) == (8, 8, ALIVE)
    (alone,) = fold([record(ALIVE, sequence=7)])
    assert not alone.has_data
    assert alone.last_sequence == 7


def test_a_heartbeat_rides_on_the_newest_write() -> None:
    """A heartbeat after a record is part of that record's write, and the newest one wins."""
    later = Heartbeat("stale", {"0": 8})
    (write,) = fold([record(run([1]), sequence=1), record(ALIVE, sequence=1), record(later, sequence=1)])
    assert write.has_data
    assert write.heartbeat == later


def test_a_heartbeat_does_not_stand_for_a_lost_record() -> None:
    """A heartbeat that names a sequence nobody delivered leaves the gap to be seen (a poison record was skipped)."""
    first, beat = fold([record(run([1]), sequence=1), record(ALIVE, sequence=2)])
    assert (first.first_sequence, first.last_sequence) == (1, 1)
    assert (beat.has_data, beat.last_sequence) == (False, 2)


def test_a_record_without_events_moves_the_fence() -> None:
    """An engine step that changed nothing still has a sequence of its own."""
    (write,) = fold([record(sequence=3, engine_sequence={"0": 5})])
    assert write.has_data
    assert (write.first_sequence, write.last_sequence, write.runs) == (3, 3, [])


def test_the_profile_goes_with_its_record() -> None:
    """A write carries the last profile that its records tell."""
    (write,) = fold([record(ProfileChanged(profile()), run([1]))])
    assert write.profile == profile()


def test_a_record_delivered_twice_in_a_row_is_one_write() -> None:
    """A repeat of the last sequence is folded into its write, for events are states."""
    (write,) = fold([record(run([1]), sequence=2), record(run([1]), sequence=2)])
    assert (write.first_sequence, write.last_sequence) == (2, 2)
