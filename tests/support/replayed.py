"""A mirror, its voice and a memory store in one row, as the services connect them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from index.digests import index_digest
from index.fold import Flush, fold
from index.memory_store import MemoryStore
from relays.cache.block_table import Limits
from relays.engine_events import EngineEvent
from relays.mirror import Mirror
from relays.records import Voice
from schemas.events import Record, decode_record, encode_record
from schemas.profiles import Holder, Profile
from tests.support.coroutines import immediate
from tests.support.engines import HOLDER


class Row:
    """One holder's way from engine events to the index, through the records' own bytes."""

    def __init__(self, profile: Profile, *, holder: Holder = HOLDER, limits: Limits | None = None) -> None:
        self.mirror = Mirror(profile, limits=limits)
        self.voice = Voice(holder, life=1)
        self.records: list[Record] = []
        self.step = 0

    def apply(self, batch: Iterable[EngineEvent]) -> None:
        """Apply one engine step's events."""
        self.mirror.apply(batch)
        self.step += 1

    def speak(self) -> list[Record]:
        """Return, and remember, what is new."""
        spoken = self.voice.speak(self.mirror, {"0": self.step}, float(self.step))
        records = [decode_record(encode_record(record)) for record in spoken]
        self.records += records
        return records

    @property
    def digest(self) -> int:
        """Return the mirror's index digest."""
        return index_digest(self.mirror.resident())


def memory_store(model: str = "m") -> MemoryStore:
    """Return an empty memory store of one model."""
    store = MemoryStore()
    immediate(store.setup(model))
    return store


def tell(store: MemoryStore, records: Sequence[Record], model: str = "m") -> None:
    """Apply records in one flush."""
    immediate(store.apply(Flush(model, None, fold(records))))


def state_of(store: MemoryStore, model: str = "m") -> dict[str, Any]:
    """Return all that the store knows, to compare."""
    rows = {str(row.holder): msgspec.structs.asdict(row) for row in immediate(store.holders(model))}
    for row in rows.values():
        row["digest"] = immediate(store.digest(model, row["holder"]))
    return rows
