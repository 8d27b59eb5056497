"""An SGLang engine that says what it is told to, and what the index then answers; pages of four tokens."""

from typing import Any

from index.hashing import pack_tokens
from index.lookup import Prompt
from index.match import Reach
from ops.replay.pipeline import InProcess
from relays.dialects import EngineSettings, sglang_profile
from tests.support.payloads import batch, map_removed, pack
from tests.support.sglang_frames import map_stored

PROMPT = [*range(1, 17)]
CLEARED = {"type": "AllBlocksCleared"}


class Told:
    """An engine whose pages have four tokens, and what the index then answers."""

    def __init__(self, version: str = "0.5.23", *, rank: int = 0, **settings: Any) -> None:
        self.index = InProcess(sglang_profile("m", "r", version, EngineSettings(**settings)), rank)
        self._rank = rank
        self._next = 0

    async def say(self, *events: object, rank: int | None = None) -> None:
        """Publish one batch."""
        payload = pack(batch(*events, rank=self._rank if rank is None else rank))
        await self.index.take(self._next, payload)
        self._next += 1

    async def ask(
        self,
        tokens: list[int] | None = None,
        *,
        whole: bool = True,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Reach:
        """Return what the engine would reuse of a prompt."""
        given = PROMPT if tokens is None else tokens
        prompt = Prompt("m", len(given), pack_tokens(given), adapter=adapter, salt=salt)
        return await self.index.predict(prompt, whole_prompt=whole)

    @property
    def doubts(self) -> dict[str, int]:
        """What the mirror could not place or apply."""
        return {reason: count for reason, count in self.index.engine.mirror.counts.items() if count}


def stored(*pages: int, **fields: object) -> dict[str, object]:
    """Return a store of pages of the prompt, counted from 1; their names are ten times that."""
    first = pages[0]
    return map_stored(
        block_hashes=[page * 10 for page in pages],
        parent_block_hash=None if first == 1 else (first - 1) * 10,
        token_ids=PROMPT[(first - 1) * 4 : pages[-1] * 4],
        **fields,
    )


def removed(*pages: int, **fields: object) -> dict[str, object]:
    """Return a removal of pages of the prompt."""
    return map_removed(block_hashes=[page * 10 for page in pages], **fields)


HOST = {"medium": "CPU_PINNED"}
