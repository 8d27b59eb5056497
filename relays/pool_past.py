"""What a pool's own records in Kafka amount to: what its relay knew before it was started again; pure.

A store without replay says nothing twice. Its relay's records say what it knew, block by block, and up to which message
of which publisher; only a life that was told to its end counts, for a relay may have died while it told it.
"""

import msgspec

from index.hashing import unpack_hashes
from schemas.events import BlocksRemoved, BlocksStored, HolderCleared, ProfileChanged, Record
from schemas.profiles import Profile


class Told(msgspec.Struct):
    """What one life's records have said so far."""

    profile: Profile
    blocks: dict[int, int] = {}  # block_hash -> residency
    received: dict[str, int] = {}  # source -> last engine sequence that these blocks complete


class Past:
    """One model's part of a pool, as its records tell it from their beginning on."""

    def __init__(self) -> None:
        self.whole: Told | None = None  # the newest life that was told to its end
        self._life = 0
        self._now: Told | None = None
        self._registered: Profile | None = None

    def read_profile(self, profile: Profile) -> None:
        """Take in the registry's newest profile: the log may no longer hold the record that told it."""
        self._registered = profile

    def take(self, record: Record) -> None:
        """Take in the next of its records."""
        if record.life < self._life:
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
        if record.engine_sequence and self._now is not None:
            self._now.received.update(record.engine_sequence)
            self.whole = self._now
