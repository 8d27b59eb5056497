"""A walk along a chain through the segments in Redis: what is asked, and what its replies say; pure.

A band's last hash vouches for all before it, so a long prompt is not sent whole: of the bands between its first two
and its last, only both ends. Where a chain leaves a segment inside such a band, the reply names the band, and the
next question carries its hashes. The functions are in `kvatlas.lua`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import sub
from struct import Struct

from index.match import Run
from schemas.events import BAND_BLOCKS, BAND_BYTES

_HEAD_BANDS = 2  # prompts part early: of the benchmark's 2048-block prompts 8 % need a second call, with 1 band 61 %
_SHARED_BYTES = range(8 * 5, 4096)  # of a segment's holders: so many that prompts share it, and few enough to keep
_SHARED_PIECES = 8  # at a chain's beginning; prompts of the benchmark have 5 pieces, the longest ones 15
_FEW_NUMBERS = 24  # of runs that are kept for all slots that have the same
_NOTHING_NEEDED = (1 << 32) - 1
_REPLY = Struct("<II")
_PIECE = Struct("<IIBHI")
_PLAIN = Struct("<HBH")
_OTHER = Struct("<HB")
_OTHER_RUN = Struct("<BBH")

Piece = tuple[int, int, bytes, bytes]
"""Where on the chain a segment begins, how many of its blocks match, its plain holders and the others.

One of more blocks than a band has stands for several, which all of its holders have as a whole.
"""


def stretches(chain: bytes, at: int, gap: int) -> list[bytes | int]:
    """Return the arguments with which the walk starts, or goes on at byte `at`, where a band's hashes were needed.

    Args:
        chain: whole bands of a prompt, the last of which may be shorter.
        gap: blocks in a row that no segment has and that do not end the walk.
    """
    head = at + (BAND_BYTES if at else _HEAD_BANDS * BAND_BYTES)
    # where the last turn ended is often in the last whole band
    tail = (len(chain) - BAND_BYTES) // BAND_BYTES * BAND_BYTES
    if gap >= BAND_BLOCKS or tail <= head:
        return [gap, 0, chain[at:]]
    between = memoryview(chain)[head:tail].cast("Q")
    ends = between[::BAND_BLOCKS].tobytes() + between[BAND_BLOCKS - 1 :: BAND_BLOCKS].tobytes()
    return [gap, 2, chain[at:head], ends, chain[tail:]]


def version_of(reply: bytes) -> int:
    """Return the version of the table that names the slots."""
    return int.from_bytes(reply[:4], "little")


def needed(reply: bytes) -> int | None:
    """Return the block, counted from where the question began, whose band must be sent whole to go on."""
    position: int = _REPLY.unpack_from(reply)[1]
    return None if position == _NOTHING_NEEDED else position


def pieces(reply: bytes, chain: bytes, offset: int) -> Iterator[Piece]:
    """Yield the segments on the way, in order; `offset`: block of the chain at which the question began."""
    at, end = _REPLY.size, len(reply)
    while at < end:
        position, blocks, hashes, plain, other = _PIECE.unpack_from(reply, at)
        plain_at = at + _PIECE.size
        other_at = plain_at + plain * _PLAIN.size
        at = other_at + other
        start = position + offset
        if hashes:
            blocks = _equal_blocks(reply[at : at + hashes * 8], chain, start * 8, hashes)
        yield start, blocks, reply[plain_at:other_at], reply[other_at : other_at + other]
        at += hashes * 8


def apart(found: Iterable[Piece], bands: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of a chain that was put together from bands of a longer one, where they stand in that.

    Args:
        bands: byte of the longer chain at which each begins.
    """
    for position, blocks, plain, other in found:
        band, inside = divmod(position, BAND_BLOCKS)
        for more in range(0, blocks, BAND_BLOCKS):
            start = bands[band + more // BAND_BLOCKS] // 8 + inside
            yield start, min(blocks, BAND_BLOCKS), plain, other


def _equal_blocks(hashes: bytes, chain: bytes, at: int, high: int) -> int:
    """Return how many of the hashes equal the chain's from byte `at` on; the first one does."""
    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle * 8 - 8 : middle * 8] == chain[at + middle * 8 - 8 : at + middle * 8]:
            low = middle
        else:
            high = middle - 1
    return low


def runs_by_slot(found: Sequence[Piece]) -> Mapping[int, Sequence[Run]]:
    """Return each slot's runs; slots of equal runs mostly share one object.

    Args:
        found: in chain order.
    """
    shared = 0
    for _, _, plain, other in found[:_SHARED_PIECES]:
        if len(plain) + len(other) not in _SHARED_BYTES:
            break
        shared += 1
    runs = _beginning(tuple(found[:shared]))
    return runs if shared == len(found) else _lengthened(runs, found[shared:])


@lru_cache(maxsize=1024)
def _beginning(found: tuple[Piece, ...]) -> Mapping[int, Sequence[Run]]:
    """Return each slot's runs after a walk's first pieces.

    What many replicas hold, many prompts begin with: of the benchmark's prompts of 64 blocks six in ten need nothing
    more, of those of 2048 two. The key is all that goes in, so nothing here can be out of date.
    """
    return _lengthened(_beginning(found[:-1]), found[-1:]) if found else {}


def _lengthened(runs: Mapping[int, Sequence[Run]], found: Iterable[Piece]) -> Mapping[int, Sequence[Run]]:
    """Return the runs of every slot after more segments."""
    ends: dict[int, list[int]] = {}
    for piece in found:
        _follow(piece, runs, ends)
    return {**runs, **{slot: _runs(numbers) for slot, numbers in ends.items()}}


def _follow(piece: Piece, runs: Mapping[int, Sequence[Run]], ends: dict[int, list[int]]) -> None:
    """Lengthen the runs of every slot of one more segment.

    Args:
        runs: of all slots, as far as they are not in `ends`.
        ends: slot -> start, end, residency of each of its runs, one behind the other.
    """
    start, blocks, plain, other = piece
    whole = start + blocks
    part = 0 if blocks > BAND_BLOCKS else blocks
    for slot, length, residency in _PLAIN.iter_unpack(plain):
        numbers = ends.get(slot)
        if numbers is None:
            numbers = ends[slot] = _numbers(runs.get(slot, ()))
        _lengthen(numbers, start, start + length if length < part else whole, residency)
    at = 0
    while at < len(other):
        slot, count = _OTHER.unpack_from(other, at)
        at += _OTHER.size
        for first, length, residency in _OTHER_RUN.iter_unpack(other[at : at + count * _OTHER_RUN.size]):
            if first < blocks:
                numbers = ends.get(slot)
                if numbers is None:
                    numbers = ends[slot] = _numbers(runs.get(slot, ()))
                _lengthen(numbers, start + first, start + min(first + length, blocks), residency)
        at += count * _OTHER_RUN.size


def _lengthen(numbers: list[int], start: int, end: int, residency: int) -> None:
    if numbers and numbers[-2] == start and numbers[-1] == residency:
        numbers[-2] = end
    else:
        numbers += (start, end, residency)


def _numbers(runs: Iterable[Run]) -> list[int]:
    """Return start, end and residency of each run, one behind the other."""
    return [number for start, length, residency in runs for number in (start, start + length, residency)]


def _runs(numbers: list[int]) -> Sequence[Run]:
    return _few_runs(tuple(numbers)) if len(numbers) <= _FEW_NUMBERS else _made(numbers)


@lru_cache(maxsize=65536)
def _few_runs(numbers: tuple[int, ...]) -> Sequence[Run]:
    return _made(numbers)


def _made(numbers: Sequence[int]) -> Sequence[Run]:
    starts, ends, residencies = numbers[::3], numbers[1::3], numbers[2::3]
    return tuple(map(Run, starts, map(sub, ends, starts), residencies))
