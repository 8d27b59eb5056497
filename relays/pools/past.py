"""What a pool's own records in Kafka amount to: what its relay knew before it was started again; pure.

A store without replay says nothing twice. Its relay's records say what it knew, block by block, and up to which message
of which publisher; only a life that was told to its end counts, for a relay may have died while it told it.
"""

from collections.abc import Iterable

import msgspec

from index.hashing import unpack_hashes
from relays.engine_events import EngineEvent, EngineHash
from schemas.events import BlocksRemoved, BlocksStored, HolderCleared, ProfileChanged, Record
from schemas.profiles import Profile


class Told(msgspec.Struct):
    """What one life's records have said so far."""

    profile: Profile
    blocks: dict[int, int] = {}  # block_hash -> residency
    received: dict[str, int] = {}  # source -> last engine sequence that these blocks complete


class Past:
    """One model's part of a pool, as its records tell it from their beginning on, and what this run hears meanwhile."""

    def __init__(self, most_blocks: int) -> None:
        """Prepare.

        Args:
            most_blocks: that are remembered, and names that are heard; past either bound nothing is believed.
        """
        self.whole: Told | None = None  # the newest life that was told to its end
        self.heard: set[EngineHash] = set()  # names in this run's messages: what was told of them before is void
        self.too_long = False
        self._most_blocks = most_blocks
        self._life = 0
        self._now: Told | None = None
        self._registered: Profile | None = None

    def read_profile(self, profile: Profile) -> None:
        """Take in the registry's newest profile: the log may no longer hold the record that told it."""
        self._registered = profile

    def hear(self, events: Iterable[EngineEvent]) -> None:
        """Take in what a publisher says in this run."""
        for event in events:
            self.heard.update(getattr(event, "hashes", ()))
        self._bound(len(self.heard))

    def take(self, record: Record) -> None:
        """Take in the next of its records."""
        if record.life < self._life or self.too_long:
            return
        if record.life > self._life:
            self._life = record.life
            self._now = None if self._registered is None else Told(self._registered)
        for event in record.events:
            if isinstance(event, ProfileChanged):
                self._now = Told(event.profile) if self._now is None else self._now
                self._now.profile = event.profile
            elif self._now is None:
                continue
            elif isinstance(event, HolderCleared):
                self._now.blocks.clear()
            elif isinstance(event, BlocksStored):
                self._now.blocks.update(dict.fromkeys(unpack_hashes(event.blocks), event.residency))
            elif isinstance(event, BlocksRemoved):
                for block in unpack_hashes(event.blocks):
                    self._now.blocks.pop(block, None)
        if self._now is not None:
            self._bound(len(self._now.blocks))
        if record.engine_sequence and self._now is not None:
            self._now.received.update(record.engine_sequence)
            self.whole = self._now

    def _bound(self, blocks: int) -> None:
        if blocks > self._most_blocks:
            self.too_long = True
            self.whole = self._now = None
            self.heard = set()
