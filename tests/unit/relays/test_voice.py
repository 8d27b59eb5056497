"""What is said while the mirror goes on between two records, as it does while Kafka has no room."""

from collections.abc import Iterable

from index.digests import index_digest
from index.fold import Flush, fold
from index.memory_store import MemoryStore
from relays.engine_events import Cleared, EngineEvent
from relays.mirror import Mirror
from relays.records import Voice
from schemas.events import HolderCleared, ProfileChanged, Record
from tests.support.coroutines import immediate
from tests.support.engines import HOLDER, profile, removed, resident, stored, tokens

BLOCKS = 40_000  # more than one look at the mirror


class Interrupted:
    """A voice that has said the first of several records, and a store that hears it."""

    def __init__(self) -> None:
        self.mirror, self.store = Mirror(profile(clear_scope="all")), MemoryStore()
        immediate(self.store.setup("m"))
        self.mirror.apply([stored(range(1, BLOCKS + 1), tokens(BLOCKS))])
        self.telling = Voice(HOLDER, 1).speak(self.mirror, {"0": 0}, 0.0)
        self.hear([next(self.telling)])

    def hear(self, records: Iterable[Record]) -> list[Record]:
        heard = list(records)
        immediate(self.store.apply(Flush("m", None, fold(heard))))
        return heard

    def go_on(self, *events: EngineEvent) -> list[Record]:
        """Let the mirror change, and hear the rest; the store then knows what the mirror does."""
        self.mirror.apply(events)
        rest = self.hear(self.telling)
        told = immediate(self.store.digest("m", HOLDER))
        assert told == index_digest(resident(self.mirror).items())
        return rest


def test_changes_between_two_records_are_said_in_the_end() -> None:
    """Removals of what was said, and of what was about to be, arrive; the last record alone completes the message."""
    rest = Interrupted().go_on(removed(1, 2, BLOCKS), stored([BLOCKS + 1], tokens(1, first=500_000)))
    assert [record.engine_sequence for record in rest] == [{}] * (len(rest) - 1) + [{"0": 0}]


def test_a_clear_between_two_records_ends_the_epoch() -> None:
    """It is said once, after the record that was made before it, and nothing is said without end."""
    rest = Interrupted().go_on(Cleared(), stored([7], tokens(1, first=500_000)))
    clears = [event for record in rest for event in record.events if isinstance(event, HolderCleared)]
    assert len(clears) == 1
    assert len(rest) <= 3


def test_a_profile_that_changes_between_two_records_is_said_before_its_bits() -> None:
    """A tier that is seen first then has a bit that the records before it do not know."""
    rest = Interrupted().go_on(stored([1], tokens(1), tier="host"))
    told = next(record for record in rest if any(isinstance(event, ProfileChanged) for event in record.events))
    assert isinstance(told.events[0], ProfileChanged)
    assert len(told.events[0].profile.pairs) == 2
