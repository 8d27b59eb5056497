"""What a worker does with the records it takes, on the memory store."""

import asyncio
from collections.abc import Sequence

from index.liveness import Judgement, judge
from index.memory_store import MemoryStore
from index.store import HolderRow
from schemas.errors import StoreUnavailable
from schemas.events import Heartbeat, Record, encode_record
from schemas.profiles import Holder
from streams.folding import DeadLetter, Folder, Taken
from tests.support.engines import HOLDER
from tests.support.records import record, run
from tests.support.writes import runs

MODEL = "m"
NOW_S = 1_800_000_000.0
ALIVE = Heartbeat("live", {"0": 7}, 1.0, "")
OTHER = Holder("r", 1)


async def _folder() -> tuple[Folder, MemoryStore, list[DeadLetter], list[Holder]]:
    store = MemoryStore()
    await store.setup(MODEL)
    letters: list[DeadLetter] = []
    asked: list[Holder] = []

    async def set_aside(letter: DeadLetter) -> None:
        letters.append(letter)

    async def ask_again(model: str, holder: Holder) -> None:
        asked.append(holder)

    folder = Folder(MODEL, "topic", store, set_aside, ask_again, clock_s=lambda: NOW_S)
    folder.topic_id = "id"
    return folder, store, letters, asked


def _taken(*records: Record | bytes, first: int = 0, partition: int = 0, age_s: float = 0.0) -> list[Taken]:
    """Return records as they stand in a log from offset `first` on."""
    values = [record if isinstance(record, bytes) else encode_record(record) for record in records]
    return [Taken(partition, first + n, NOW_S - age_s, None, value) for n, value in enumerate(values)]


async def _fold(folder: Folder, taken: Sequence[Taken], end: int | None = 0) -> None:
    await folder.store(folder.read(taken, lambda partition: end))


async def _judged(store: MemoryStore) -> dict[Holder, Judgement]:
    return {row.holder: judge(row, stale_after_s=5.0, unknown_after_s=30.0) for row in await store.holders(MODEL)}


async def test_reading_ahead_changes_nothing_until_it_is_stored() -> None:
    """Batches may be read while an earlier one is on its way; each is in the index once it is stored."""
    folder, store, _, _ = await _folder()
    one = folder.read(_taken(record(run([1, 2]), sequence=1)), lambda partition: 2)
    two = folder.read(_taken(record(run([1, 2, 3]), sequence=2), first=1), lambda partition: 2)
    assert await store.cursors(MODEL) == {}
    await folder.store(one)
    assert await runs(store, MODEL, [1, 2, 3]) == {"r/0": [(0, 2, 1)]}
    await folder.store(two)
    assert await runs(store, MODEL, [1, 2, 3]) == {"r/0": [(0, 3, 1)]}
    assert await store.cursors(MODEL) == {("id", 0): 2}
    assert folder.folded == 2


async def test_a_record_that_cannot_be_read_is_set_aside_and_passed() -> None:
    """Its neighbours are folded, the cursor goes past it, and the gap it leaves is asked for again."""
    folder, store, letters, asked = await _folder()
    records: list[Record | bytes] = [record(run([1]), sequence=1), b"\xc1", record(run([1, 2]), sequence=3)]
    await _fold(folder, _taken(*records, partition=4))
    assert [(letter.reason, letter.record.offset) for letter in letters] == [("record_malformed", 1)]
    assert await store.cursors(MODEL) == {("id", 4): 3}
    assert await runs(store, MODEL, [1, 2]) == {"r/0": [(0, 2, 1)]}
    assert asked == [HOLDER]


async def test_heartbeats_of_the_past_do_not_make_a_holder_live() -> None:
    """A worker that reads a long log from its beginning says so of each holder, until it is near the log's end."""
    folder, store, _, _ = await _folder()
    rebuilding = Judgement("unknown", ("rebuilding",))
    await _fold(folder, _taken(record(run([1, 2])), record(ALIVE), age_s=3600.0), end=5000)
    assert await _judged(store) == {HOLDER: rebuilding}
    (row,) = await store.holders(MODEL)
    assert row.received == {"0": 7}
    await _fold(folder, _taken(record(ALIVE), first=2, age_s=11.0), end=None)  # how far there is to go is not known
    assert await _judged(store) == {HOLDER: rebuilding}
    await _fold(folder, _taken(record(ALIVE), first=4000, age_s=9.0), end=5000)
    assert await _judged(store) == {HOLDER: Judgement("live")}


async def test_a_slow_clock_does_not_blind_a_worker_that_keeps_up() -> None:
    """A relay whose clock is an hour behind is believed by who reads the end of the log."""
    folder, store, _, _ = await _folder()
    await _fold(folder, _taken(record(run([1])), record(ALIVE), age_s=3600.0), end=2)
    assert await _judged(store) == {HOLDER: Judgement("live")}


async def test_within_one_batch_the_past_ends_with_the_last_heartbeats() -> None:
    """Of two holders in it the one that fell silent long ago is not believed."""
    folder, store, _, _ = await _folder()
    said = _taken(record(run([1])), record(ALIVE), age_s=600.0)
    others = [record(run([1]), holder=OTHER), *[record(ALIVE, holder=OTHER)] * 300]
    said += _taken(*others, first=2, age_s=1.0)
    await _fold(folder, said, end=303)
    assert await _judged(store) == {HOLDER: Judgement("unknown", ("rebuilding",)), OTHER: Judgement("live")}


async def test_a_heartbeat_of_a_life_never_seen_has_its_relay_asked() -> None:
    """What it had said before is not in this log: the holder is not live, and is to tell everything again."""
    folder, store, _, asked = await _folder()
    await _fold(folder, _taken(record(ALIVE, sequence=9)), end=1)
    assert asked == [HOLDER]
    assert await _judged(store) == {HOLDER: Judgement("unknown", ("records_lost",))}
    await _fold(folder, _taken(record(run([1, 2]), life=2), record(ALIVE, life=2), first=1), end=3)
    assert await _judged(store) == {HOLDER: Judgement("live")}
    assert asked == [HOLDER]


async def test_dead_letters_do_not_wait_for_one_another() -> None:
    """Kafka's time to take one is not spent a hundred times over, while valid records wait behind them."""
    store = MemoryStore()
    await store.setup(MODEL)
    waiting: list[DeadLetter] = []
    all_wait = asyncio.Event()

    async def set_aside(letter: DeadLetter) -> None:
        waiting.append(letter)
        if len(waiting) == 100:
            all_wait.set()
        await all_wait.wait()

    async def ask_again(model: str, holder: Holder) -> None:
        raise AssertionError

    folder = Folder(MODEL, "topic", store, set_aside, ask_again, clock_s=lambda: NOW_S)
    folder.topic_id = "id"
    async with asyncio.timeout(5.0):
        await _fold(folder, _taken(*[b"\xc1"] * 100, record(run([1]))))
    assert [letter.record.offset for letter in waiting] == list(range(100))
    assert await runs(store, MODEL, [1]) == {"r/0": [(0, 1, 1)]}


async def test_a_store_that_goes_away_before_a_gap_is_asked_about_stops_nothing() -> None:
    """The records are stored; who lost some is asked for again when the worker next looks."""

    class GoingAway(MemoryStore):
        async def holders(self, model: str) -> list[HolderRow]:
            raise StoreUnavailable("gone")

    store = GoingAway()
    await store.setup(MODEL)

    async def never(*_: object) -> None:
        raise AssertionError

    folder = Folder(MODEL, "topic", store, never, never, clock_s=lambda: NOW_S)
    folder.topic_id = "id"
    await _fold(folder, _taken(record(run([1]), sequence=1), record(run([1, 2]), sequence=3)))
    assert await store.cursors(MODEL) == {("id", 0): 2}
    assert folder.folded == 2


async def test_a_relay_that_another_one_fenced_and_left_is_asked_to_begin_anew() -> None:
    """While the higher life speaks the lower is refused; once it is silent the one that is left speaks above it."""
    now_s = [100.0]
    store = MemoryStore(lambda: now_s[0])
    await store.setup(MODEL)
    asked: list[Holder] = []

    async def set_aside(letter: DeadLetter) -> None:
        raise AssertionError

    async def ask_again(model: str, holder: Holder) -> None:
        asked.append(holder)

    folder = Folder(MODEL, "topic", store, set_aside, ask_again, clock_s=lambda: NOW_S)
    folder.topic_id = "id"
    await _fold(folder, _taken(record(run([1]), life=2), record(ALIVE, life=2)))
    now_s[0] += 9.0
    await _fold(folder, _taken(record(run([1]), life=1, sequence=8), first=2))
    assert asked == []
    now_s[0] += 2.0
    await _fold(folder, _taken(record(run([1]), life=1, sequence=9), first=3))
    assert asked == [HOLDER]
