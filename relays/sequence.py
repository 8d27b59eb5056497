"""The order of one source's messages: gaps, repeats, replays and lives; pure.

DESIGN 5. Messages of a life are delivered once, in order, without a hole. A hole that the engine's ring can no
longer fill, or a sequence that goes back, ends the life. Every replay is asked from the last message delivered, not
from the one after it: the ring always holds its newest message, so the same life answers with the same bytes, a
restarted engine does not, and nothing of a replay counts before that message came again.

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
    """Ask the engine to replay from here; answers to earlier requests no longer count."""

    sequence: int
    number: int  # of the request, to be said with each of its answers


class NewLife(NamedTuple):
    """Retract everything that was known of this source."""

    reason: "Reason"


Reason = Literal["sequence_back", "hole", "restarted", "unverified"]
"""Why a life ends; `unverified`: a new connection, and no replay that shows whether the engine is the same."""

Action = Deliver | Ask | NewLife


class Sequencer:
    """One source; without a replay ring it is believed over lost connections as long as its sequence goes on."""

    def __init__(self, buffer_messages: int = 100_000, *, has_ring: bool = True) -> None:
        self.verified = False  # the present connection leads to the engine whose messages were delivered
        self.caught_up = False  # all was delivered that could be had when this life began
        self._next: int | None = None  # None: nothing of this life yet
        self._heard = -1  # highest published sequence since the connection, or the life, began
        self._held: dict[int, bytes] = {}  # messages that came before their turn
        self._held_bytes = 0
        self._buffer_messages = buffer_messages
        self._has_ring = has_ring
        self._dropped_to = -1  # highest sequence that found the buffer full
        self._digests: OrderedDict[int, int] = OrderedDict()
        self._number = 0  # of the newest request
        self._running = False  # it has not ended
        self._probe: int | None = None  # asked for again; until something delivered comes again, no answer counts
        self._attempts = 0
        self._next_asked: int | None = None  # `_next` when the running replay was asked for

    @property
    def replaying(self) -> bool:
        """Return whether a request is being answered."""
        return self._running

    @property
    def last(self) -> int | None:
        """Return the last sequence delivered in this life."""
        return None if self._next is None or self._next == 0 else self._next - 1

    def connect(self) -> list[Action]:
        """Begin, or begin again on a new connection, at whose other end may be another engine."""
        self.disconnect()
        self._attempts = 0
        return [self._ask()]

    def disconnect(self) -> None:
        """Doubt what comes from now on: replays may be answered by another engine already."""
        self.verified = False
        self._let_go()

    def probe(self) -> list[Action]:
        """Ask a quiet source: a lost tail and a restarted engine show only so."""
        if self._running:
            return []
        self._attempts = 0
        return [self._ask()]

    def live(self, sequence: int, payload: bytes) -> list[Action]:
        """Take a published message."""
        if sequence <= self._heard or (self._next is not None and sequence < self._next):
            if self._known(sequence) == xxh3_64_intdigest(payload):
                return []
            # a published stream never goes back by itself
            end = self._end_life("sequence_back")
            self._heard = sequence
            self._hold(sequence, payload)
            return [*end, self._ask()]
        self._heard = sequence
        if sequence == self._next and self._believed:
            return [self._deliver(sequence, payload), *self._drain()]
        self._hold(sequence, payload)
        if self._running:
            return []
        self._attempts = 0
        return [self._ask()]

    def replayed(self, number: int, sequence: int, payload: bytes) -> list[Action]:
        """Take a message of the replay that was asked for with this number."""
        if not self._running or number != self._number:
            return []
        known = self._known(sequence)
        if known is not None and known != xxh3_64_intdigest(payload):
            return [*self._end_life("restarted"), self._ask()]
        if self._next is not None and sequence < self._next:
            if known is not None:
                self._probe = None  # what was delivered came again
                self.verified = True
            return []
        if self._probe is not None or self._next not in (None, sequence):
            self._hold(sequence, payload)
            return []
        return [self._deliver(sequence, payload), *self._drain()]

    def replay_ended(self, number: int, *, answered: bool = True) -> list[Action]:
        """Take the end mark, or (not answered) the end of our patience."""
        if not self._running or number != self._number:
            return []
        self._running = False
        probe, self._probe = self._probe, None
        if answered and probe is None:
            self.verified = True
        if answered and probe is not None and not self._held:
            # nothing that was delivered, and nothing newer: the ring of another engine
            return [*self._end_life("restarted"), self._ask()]
        if answered and self._next is None and not self._held:
            self._next = 0  # an engine that has published nothing yet
        actions = self._drain() if self._believed else []
        self._drop_past()
        if not self._owing():
            self.caught_up = True
            return actions
        self._attempts = 0 if self._next != self._next_asked else self._attempts + 1
        if self._attempts < _ATTEMPTS:
            return [*actions, self._ask()]
        return [*actions, *self._give_up_hole()]

    # ---- steps

    @property
    def _believed(self) -> bool:
        return self.verified or not self._has_ring

    def _ask(self) -> Ask:
        self._number += 1
        self._running = True
        self._next_asked = self._next
        self._probe = self.last
        return Ask(self._next or 0 if self._probe is None else self._probe, self._number)

    def _deliver(self, sequence: int, payload: bytes) -> Deliver:
        self._next = sequence + 1
        self._unhold(sequence)
        self._digests[sequence] = xxh3_64_intdigest(payload)
        if len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)
        return Deliver(sequence, payload)

    def _drain(self) -> list[Action]:
        """Deliver what is next in line."""
        actions: list[Action] = []
        while self._next in self._held:
            actions.append(self._deliver(self._next, self._held[self._next]))
        return actions

    def _give_up_hole(self) -> list[Action]:
        """Begin a life with what follows the hole: what is known from before it cannot be trusted (case C04)."""
        self._dropped_to = -1
        self._attempts = 0
        self.caught_up = True
        if not self._held:
            return []
        actions: list[Action] = []
        held, heard = dict(self._held), self._heard
        if self.last is not None:
            actions += self._end_life("unverified" if self._next in held else "hole")
            self._held, self._held_bytes, self._heard = held, sum(map(len, held.values())), heard
        self._next = min(held)
        self.verified = self.caught_up = True
        actions += self._drain()
        return [*actions, self._ask()] if self._held else actions

    def _end_life(self, reason: Reason) -> list[Action]:
        """Forget all that is known; where nothing was, nothing needs to be retracted."""
        had_any = self.last is not None
        self._running = self.verified = self.caught_up = False
        self._next = None
        self._probe = None
        self._attempts = 0
        self._digests.clear()
        self._let_go()
        return [NewLife(reason)] if had_any else []

    # ---- messages before their turn

    def _hold(self, sequence: int, payload: bytes) -> None:
        if sequence in self._held:
            return
        if len(self._held) >= self._buffer_messages or self._held_bytes >= _BUFFER_BYTES:
            self._dropped_to = max(self._dropped_to, sequence)
            return
        self._held[sequence] = payload
        self._held_bytes += len(payload)

    def _unhold(self, sequence: int) -> None:
        self._held_bytes -= len(self._held.pop(sequence, b""))

    def _drop_past(self) -> None:
        """Let go of what came before this life's first message."""
        for sequence in [held for held in self._held if held < (self._next or 0)]:
            self._unhold(sequence)

    def _let_go(self) -> None:
        """Drop what is held; where it still counts, a replay brings it again."""
        self._held = {}
        self._held_bytes = 0
        self._heard = self._dropped_to = -1

    def _owing(self) -> bool:
        """Return whether messages are known of that could not be delivered yet."""
        return bool(self._held) or self._dropped_to >= (self._next or 0)

    def _known(self, sequence: int) -> int | None:
        """Return the digest of a message that was delivered or is held."""
        held = self._held.get(sequence)
        return self._digests.get(sequence) if held is None else xxh3_64_intdigest(held)
