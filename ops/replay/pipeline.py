"""Where a replay's messages go and its questions are answered: in process here, through the stack in stack.py."""

from typing import Protocol

from index.fold import Flush, fold
from index.lookup import Prompt, ask, reaches
from index.match import NOTHING, Reach
from index.memory_store import MemoryStore
from relays.engine import EngineRank
from schemas.events import decode_record, encode_record
from schemas.profiles import Holder, Profile


class Pipeline(Protocol):
    """One holder's way from messages to answers."""

    async def take(self, sequence: int, payload: bytes) -> None:
        """Bring one message in."""

    async def predict(self, prompt: Prompt, *, whole_prompt: bool = False) -> Reach:
        """Return what the engine would reuse of a prompt, after all messages so far."""


class InProcess:
    """Decoder, mirror, records, fold and the memory store, as the services run them."""

    def __init__(self, profile: Profile, rank: int = 0) -> None:
        self.engine = EngineRank(profile, Holder(profile.name, rank), life=1)
        self._store = MemoryStore()
        self._ready = False

    async def take(self, sequence: int, payload: bytes) -> None:
        """Bring one message in."""
        self.engine.take(sequence, payload)
        await self.fold()

    async def fold(self) -> None:
        """Bring what the mirror has to say into the store, through the records' own bytes."""
        model = self.engine.mirror.profile.model
        if not self._ready:
            await self._store.setup(model)
            self._ready = True
        records = [decode_record(encode_record(record)) for record in self.engine.speak()]
        await self._store.apply(Flush(model, None, fold(records)))

    async def predict(self, prompt: Prompt, *, whole_prompt: bool = False) -> Reach:
        """Return what the engine would reuse of a prompt."""
        await self.fold()
        for row in await self._store.holders(prompt.model):
            if row.holder == self.engine.holder and row.profile is not None:
                question = ask(row.holder, row.profile)
                answers = await reaches(self._store, prompt, [question], whole_prompt=whole_prompt)
                return answers.get(row.holder, NOTHING)
        return NOTHING
