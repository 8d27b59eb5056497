"""What is asked of Redis for a chain, and what its replies mean."""

import struct
import time

from index.hashing import pack_hashes
from index.match import Run
from index.walks import Piece, apart, needed, pieces, runs_by_slot, stretches, version_of

CHAIN = list(range(1, 2049))
PACKED = pack_hashes(CHAIN)
NONE = (1 << 32) - 1


def plain(*holders: tuple[int, int, int]) -> bytes:
    """Slot, length and residency of holders that have a segment from its start."""
    return b"".join(struct.pack("<HBH", *holder) for holder in holders)


def other(slot: int, *runs: tuple[int, int, int]) -> bytes:
    """Start, length and residency of a holder's runs."""
    return struct.pack("<HB", slot, len(runs)) + b"".join(struct.pack("<BBH", *run) for run in runs)


def test_a_long_chain_is_asked_for_by_the_ends_of_its_middle_bands() -> None:
    """Two bands and the last one go whole, of each other one its first and last hash."""
    gap, by_ends, head, ends, tail = stretches(PACKED, 0, 0)
    assert (gap, by_ends) == (0, 2)
    assert (head, tail) == (PACKED[: 256 * 8], PACKED[1920 * 8 :])
    middle = CHAIN[256:1920]
    assert ends == pack_hashes([*middle[::128], *middle[127::128]])


def test_the_band_before_an_unfinished_one_is_sent_whole() -> None:
    """A conversation's last turn mostly ended there, so that the prompt leaves its segment."""
    *_, tail = stretches(PACKED[: 1000 * 8], 0, 0)
    assert tail == PACKED[768 * 8 : 1000 * 8]


def test_short_chains_and_long_gaps_are_sent_whole() -> None:
    """Nothing is left out where every band would be sent, nor where blocks may lie apart by a band or more."""
    assert stretches(PACKED[: 400 * 8], 0, 0) == [0, 0, PACKED[: 400 * 8]]
    assert stretches(PACKED, 0, 128) == [128, 0, PACKED]
    assert len(stretches(PACKED, 0, 127)) == 5


def test_a_walk_goes_on_with_the_band_that_was_needed() -> None:
    """That band is sent whole, the others as before."""
    gap, by_ends, head, ends, tail = stretches(PACKED, 512 * 8, 3)
    assert (gap, by_ends) == (3, 2)
    assert (head, tail) == (PACKED[512 * 8 : 640 * 8], PACKED[1920 * 8 :])
    middle = CHAIN[640:1920]
    assert ends == pack_hashes([*middle[::128], *middle[127::128]])


def test_a_reply_names_its_version_its_segments_and_what_it_needs() -> None:
    """Positions count from where the question began; a segment with hashes is compared here."""
    holders = plain((7, 128, 1)), other(8, (3, 4, 2))
    head = struct.pack("<HI", 1, len(holders[1])) + b"".join(holders)
    hashes = pack_hashes([*CHAIN[384:400], 99, 98])
    reply = struct.pack("<II", 5, 256) + struct.pack("<IIB", 0, 128, 0) + head
    reply += struct.pack("<IIB", 128, 0, 18) + head + hashes
    assert (version_of(reply), needed(reply)) == (5, 256)
    assert list(pieces(reply, PACKED, 256)) == [(256, 128, *holders), (384, 16, *holders)]
    assert needed(struct.pack("<II", 5, NONE)) is None


def test_runs_go_on_from_segment_to_segment() -> None:
    """Neighbouring segments join where residency is the same; a holder counts no further than the chain matches."""
    found: list[Piece] = [
        (0, 128, plain((1, 128, 1), (2, 128, 1), (3, 100, 1)), other(4, (0, 10, 1), (20, 5, 2))),
        (128, 40, plain((1, 60, 1), (2, 60, 3)), other(3, (39, 5, 1), (45, 3, 1))),
    ]
    assert runs_by_slot(found) == {
        1: (Run(0, 168, 1),),
        2: (Run(0, 128, 1), Run(128, 40, 3)),
        3: (Run(0, 100, 1), Run(167, 1, 1)),
        4: (Run(0, 10, 1), Run(20, 5, 2)),
    }


def test_a_piece_may_stand_for_several_bands() -> None:
    """All of its holders have all of them."""
    assert runs_by_slot([(0, 384, plain((1, 128, 1)), b""), (384, 128, plain((1, 8, 1)), b"")]) == {
        1: (Run(0, 392, 1),)
    }


def test_what_many_hold_is_decoded_once() -> None:
    """Slots of equal runs share one object, also between prompts that begin alike."""
    shared: Piece = (0, 128, plain(*((slot, 128, 1) for slot in range(20))), b"")
    one = runs_by_slot([shared, (128, 128, plain((0, 128, 1)), b"")])
    two = runs_by_slot([shared, (128, 64, plain((1, 64, 1)), b"")])
    assert one[0] == (Run(0, 256, 1),)
    assert two[1] == (Run(0, 192, 1),)
    assert one[2] is two[2] is one[19]


def test_the_longest_chains_are_decoded_in_a_moment() -> None:
    """A million blocks whose residency differs from band to band take neither recursion nor the square of the bands."""
    bands = 8000
    found: list[Piece] = [
        (band * 128, 128, plain(*((slot, 128, 1 + (band + slot) % 2) for slot in range(20))), b"")
        for band in range(bands)
    ]
    began_s = time.process_time()
    runs = runs_by_slot(found)
    assert time.process_time() - began_s < 5.0  # 0.3 s; 8 s where only 1000 bands took the square
    assert len(runs) == 20
    assert runs[7] == tuple(Run(band * 128, 128, 1 + (band + 7) % 2) for band in range(bands))


def test_bands_of_a_longer_chain_are_put_back_where_they_stand() -> None:
    """A shard walks its own bands as one chain; a piece of several bands falls apart again."""
    found: list[Piece] = [(0, 256, b"a", b""), (256 + 40, 60, b"b", b"")]
    bands = [128 * 8, 512 * 8, 896 * 8]
    assert list(apart(found, bands)) == [(128, 128, b"a", b""), (512, 128, b"a", b""), (896 + 40, 60, b"b", b"")]
