"""The order of one source's messages: gaps, repeats, replays and lives; pure.

DESIGN 5. Messages of a life are delivered once, in order, without a hole. A hole that the engine's ring can no
longer fill, or a sequence that goes back, ends the life. An idle source is asked for its last message again: its
ring always holds that one, so the same life answers with the same bytes and a restarted engine does not.

Source: engines/vllm-events.md 1.1 and 1.4, engines/other-engines.md 1.1 (replays lose messages, their end mark
proves nothing, and a start that has fallen out of the ring is silently moved).
"""

from collections import OrderedDict
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest

_REMEMBERED = 16_384  # digests of delivered messages, to tell a repeat from a restarted engine
_BUFFER_BYTES = 256 << 20
_ATTEMPTS = 2  # replays without progress before a hole is given up (case C04)


class Deliver(NamedTuple):
    """Apply this message."""

    sequence: int
    payload: bytes


class Ask(NamedTuple):
    """Ask the engine to replay from here."""

    sequence: int


class NewLife(NamedTuple):
    """Retract everything that was known of this source."""

    reason: Literal["sequence_back", "hole", "restarted"]


Action = Deliver | Ask | NewLife


class Sequencer:
    """One source with a replay ring."""

    def __init__(self, buffer_messages: int = 100_000) -> None:
        self.replaying = False
        self._next: int | None = None  # None: nothing of this life yet
        self._buffer: dict[int, bytes] = {}  # live messages that came before their turn
        self._buffer_messages = buffer_messages
        self._held_bytes = 0
        self._digests: OrderedDict[int, int] = OrderedDict()
        self._attempts = 0
        self._next_asked: int | None = None  # `_next` when the running replay was asked for
        self._probe: int | None = None  # the message that must come again
        self.dropped = 0  # live messages that found the buffer full; replayed later

    @property
    def last(self) -> int | None:
        """Return the last sequence delivered in this life."""
        return None if self._next is None or self._next == 0 else self._next - 1

    def start(self) -> list[Action]:
        """Begin, or begin again after a silence: ask for all that is missing, and for the last one again."""
        if self.replaying:
            return []
        self._attempts = 0
        return [self._ask(probe=True)]

    def live(self, sequence: int, payload: bytes) -> list[Action]:
        """Take a published message."""
        if self.replaying or self._next is None:
            self._hold(sequence, payload)
            return [] if self.replaying else [self._ask()]
        if sequence == self._next:
            return [self._deliver(sequence, payload)]
        if sequence > self._next:
            self._hold(sequence, payload)
            self._attempts = 0
            return [self._ask()]
        if self._digests.get(sequence) == xxh3_64_intdigest(payload):
            return []
        # a published stream never goes back by itself
        actions: list[Action] = [self._end_life("sequence_back")]
        self._hold(sequence, payload)
        return [*actions, self._ask()]

    def replayed(self, sequence: int, payload: bytes) -> list[Action]:
        """Take a message of the running replay."""
        if not self.replaying:
            return []
        if self._next is None or sequence == self._next:
            return [self._deliver(sequence, payload)]
        if sequence > self._next:
            self._hold(sequence, payload)
            return []
        known = self._digests.get(sequence)
        if known is None or known == xxh3_64_intdigest(payload):
            if sequence == self._probe:
                self._probe = None
            return []
        return [self._end_life("restarted"), self._ask()]

    def replay_ended(self, *, answered: bool = True) -> list[Action]:
        """Take the end mark, or (not answered) the end of our patience."""
        if not self.replaying:
            return []
        self.replaying = False
        if answered and self._probe is not None:
            return [self._end_life("restarted"), self._ask()]
        if answered and self._next is None and not self._buffer:
            self._next = 0  # an engine that has published nothing yet
        actions = self._drain()
        if not self._buffer or self.replaying:
            return actions
        progress = self._next != self._next_asked
        self._attempts = 0 if progress else self._attempts + 1
        if self._attempts < _ATTEMPTS:
            return [*actions, self._ask()]
        # nobody can tell what was in the hole: what is known from before it cannot be trusted, what follows can
        held = self._buffer
        if self._next is not None:
            actions.append(self._end_life("hole"))
            self._hold_all(held)
        self._next = min(held)
        self._attempts = 0
        actions += self._drain()
        return [*actions, self._ask()] if self._buffer else actions

    def _ask(self, *, probe: bool = False) -> Ask:
        self.replaying = True
        self._next_asked = self._next
        self._probe = self.last if probe else None
        return Ask(self._probe if self._probe is not None else self._next or 0)

    def _deliver(self, sequence: int, payload: bytes) -> Deliver:
        self._next = sequence + 1
        self._digests[sequence] = xxh3_64_intdigest(payload)
        if len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)
        return Deliver(sequence, payload)

    def _hold(self, sequence: int, payload: bytes) -> None:
        if len(self._buffer) >= self._buffer_messages or self._held_bytes >= _BUFFER_BYTES:
            self.dropped += 1
        elif sequence not in self._buffer:
            self._buffer[sequence] = payload
            self._held_bytes += len(payload)

    def _hold_all(self, messages: dict[int, bytes]) -> None:
        for sequence, payload in messages.items():
            self._hold(sequence, payload)

    def _unhold(self, sequence: int) -> bytes:
        payload = self._buffer.pop(sequence)
        self._held_bytes -= len(payload)
        return payload

    def _drain(self) -> list[Action]:
        """Deliver what is next in line; a held message of the past that is no repeat tells of a restart."""
        actions: list[Action] = []
        for sequence in sorted(self._buffer):
            if self._next is not None and sequence < self._next:
                payload = self._unhold(sequence)
                if self._digests.get(sequence, xxh3_64_intdigest(payload)) != xxh3_64_intdigest(payload):
                    held = {sequence: payload, **self._buffer}
                    actions.append(self._end_life("sequence_back"))
                    self._hold_all(held)
                    return [*actions, self._ask()]
            elif self._next is not None and sequence == self._next:
                actions.append(self._deliver(sequence, self._unhold(sequence)))
        return actions

    def _end_life(self, reason: Literal["sequence_back", "hole", "restarted"]) -> NewLife:
        self.replaying = False
        self._next = None
        self._probe = None
        self._attempts = 0
        self._buffer = {}
        self._held_bytes = 0
        self._digests.clear()
        return NewLife(reason)
