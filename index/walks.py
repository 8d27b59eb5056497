"""A walk along a chain through the segments in Redis: what is asked, and what its replies say; pure.

A band's last hash vouches for all before it, so a long prompt is not sent whole: of the bands between its first two
and its last, only both ends. Where a chain leaves a segment inside such a band, the reply names the band, and the
next question carries its hashes. The functions are in `kvatlas.lua`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from struct import Struct

from index.hashing import BAND_BLOCKS
from index.match import Run

_BAND_BYTES = BAND_BLOCKS * 8
_HEAD_BANDS = 2  # prompts part early: of the benchmark's 2048-block prompts 8 % need a second call, with 1 band 61 %
_SHARED_BYTES = range(8 * 5, 4096)  # of a segment's holders: so many that prompts share it, and few enough to keep
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
    head = at + (_BAND_BYTES if at else _HEAD_BANDS * _BAND_BYTES)
    # where the last turn ended is often in the last whole band
    tail = (len(chain) - _BAND_BYTES) // _BAND_BYTES * _BAND_BYTES
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
    for _, _, plain, other in found:
        if len(plain) + len(other) not in _SHARED_BYTES:
            break
        shared += 1
    runs = _beginning(tuple(found[:shared]))
    if shared == len(found):
        return runs
    longer: dict[int, History] = {}
    for piece in found[shared:]:
        _follow(piece, runs, longer)
    return {**runs, **{slot: _runs(history) for slot, history in longer.items()}}


History = tuple[int, ...]
"""A slot's runs so far, each as start, end, residency."""


@lru_cache(maxsize=1024)
def _beginning(found: tuple[Piece, ...]) -> Mapping[int, Sequence[Run]]:
    """Return each slot's runs after a walk's first pieces.

    What many replicas hold, many prompts begin with: six of seven prompts of the benchmark find theirs here, and most
    others all but its last piece. The key is all that goes in, so nothing here can be out of date.
    """
    if not found:
        return {}
    runs = _beginning(found[:-1])
    longer: dict[int, History] = {}
    _follow(found[-1], runs, longer)
    return {**runs, **{slot: _runs(history) for slot, history in longer.items()}}


def _follow(piece: Piece, before: Mapping[int, Sequence[Run]], histories: dict[int, History]) -> None:
    """Lengthen the history of every slot in one more segment; `before`: runs of those that are not in `histories`."""
    start, blocks, plain, other = piece
    whole = start + blocks
    part = 0 if blocks > BAND_BLOCKS else blocks
    for slot, length, residency in _PLAIN.iter_unpack(plain):
        history = histories.get(slot) or _history(before.get(slot))
        end = start + length if length < part else whole
        if history and history[-2] == start and history[-1] == residency:
            histories[slot] = history[:-2] + (end, residency)  # noqa: RUF005  # half the time of unpacking
        else:
            histories[slot] = history + (start, end, residency)  # noqa: RUF005
    at = 0
    while at < len(other):
        slot, count = _OTHER.unpack_from(other, at)
        stop = at + _OTHER.size + count * _OTHER_RUN.size
        history = histories.get(slot) or _history(before.get(slot))
        for first, length, residency in _OTHER_RUN.iter_unpack(other[at + _OTHER.size : stop]):
            if first < blocks:
                first, end = start + first, start + min(first + length, blocks)
                if history and history[-2] == first and history[-1] == residency:
                    history = (*history[:-2], end, residency)
                else:
                    history = (*history, first, end, residency)
        if history:
            histories[slot] = history
        at = stop


def _history(runs: Sequence[Run] | None) -> History:
    return (
        tuple(number for run in runs for number in (run.start, run.start + run.length, run.residency)) if runs else ()
    )


@lru_cache(maxsize=65536)
def _runs(history: History) -> Sequence[Run]:
    numbers = iter(history)
    return tuple(
        Run(start, end - start, residency) for start, end, residency in zip(numbers, numbers, numbers, strict=True)
    )
