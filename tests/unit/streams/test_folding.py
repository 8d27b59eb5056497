"""What a worker does with the records it takes, on the memory store."""

from index.memory_store import MemoryStore
from schemas.events import encode_record
from schemas.profiles import Holder
from streams.folding import DeadLetter, Folder, Taken
from tests.support.engines import HOLDER
from tests.support.records import record, run
from tests.support.writes import runs

MODEL = "m"


async def _folder() -> tuple[Folder, MemoryStore, list[DeadLetter], list[Holder]]:
    store = MemoryStore()
    await store.setup(MODEL)
    letters: list[DeadLetter] = []
    asked: list[Holder] = []

    async def set_aside(letter: DeadLetter) -> None:
        letters.append(letter)

    async def ask_again(model: str, holder: Holder) -> None:
        asked.append(holder)

    folder = Folder(MODEL, "topic", store, set_aside, ask_again)
    folder.topic_id = "id"
    return folder, store, letters, asked


async def test_reading_ahead_changes_nothing_until_it_is_stored() -> None:
    """Batches may be read while an earlier one is on its way; each is in the index once it is stored."""
    folder, store, _, _ = await _folder()
    one = folder.read([Taken(0, 0, None, encode_record(record(run([1, 2]), sequence=1)))])
    two = folder.read([Taken(0, 1, None, encode_record(record(run([1, 2, 3]), sequence=2)))])
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
    values = [encode_record(record(run([1]), sequence=1)), b"\xc1", encode_record(record(run([1, 2]), sequence=3))]
    await folder.fold([Taken(4, offset, b"r", value) for offset, value in enumerate(values)])
    assert [(letter.reason, letter.record.offset) for letter in letters] == [("record_malformed", 1)]
    assert await store.cursors(MODEL) == {("id", 4): 3}
    assert await runs(store, MODEL, [1, 2]) == {"r/0": [(0, 2, 1)]}
    assert asked == [HOLDER]
