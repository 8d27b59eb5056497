"""An engine's numbered messages and its replay ring, and a relay's side of the conversation, without sockets."""

from collections.abc import Callable, Sequence

from relays.sequence import Action, Ask, Deliver, NewLife, Sequencer


class RingedEngine:
    """Publishes numbered messages and keeps the last of them; a restart begins at 0 with an empty ring."""

    def __init__(self, ring: int = 1000) -> None:
        self.run = 0
        self.next = 0
        self._size = ring
        self._ring: dict[int, bytes] = {}

    def publish(self) -> tuple[int, bytes]:
        """Return the next message."""
        sequence, self.next = self.next, self.next + 1
        self._ring[sequence] = payload = b"%d:%d" % (self.run, sequence)
        while len(self._ring) > self._size:
            del self._ring[min(self._ring)]
        return sequence, payload

    def burn(self) -> None:
        """Use up a number that no message gets, as a failed encoding does (case C04)."""
        self.next += 1

    def restart(self) -> None:
        """Begin anew under the same address."""
        self.run += 1
        self.next = 0
        self._ring = {}

    def ring(self, start: int) -> list[tuple[int, bytes]]:
        """Return what a replay sends."""
        return [message for message in sorted(self._ring.items()) if message[0] >= start]


class Listener:
    """Carries out what a sequencer decides, and checks what it delivers: in order, once, without a hole."""

    def __init__(self, sequencer: Sequencer | None = None) -> None:
        self.sequencer = sequencer or Sequencer()
        self.life: list[tuple[int, bytes]] = []  # delivered since the last new life
        self.lives: list[str] = []  # why each later life began
        self.asked: list[Ask] = []

    @property
    def sequences(self) -> list[int]:
        """Return the numbers delivered in this life."""
        return [sequence for sequence, _ in self.life]

    def take(self, actions: Sequence[Action]) -> None:
        """Carry out."""
        for action in actions:
            match action:
                case Deliver(sequence, payload):
                    assert not self.life or sequence == self.life[-1][0] + 1
                    self.life.append((sequence, payload))
                case NewLife(reason):
                    assert self.life, "nothing to retract"
                    self.lives.append(reason)
                    self.life = []
                case Ask():
                    self.asked.append(action)

    def answer(self, engine: RingedEngine, keep: Callable[[int], bool] = lambda _: True) -> None:
        """Answer the newest request, and those that follow from it, until there is none; `keep` loses messages."""
        answers = 0
        while self.sequencer.replaying:
            answers += 1
            assert answers < 100, "an endless loop of requests"  # each hole costs two
            ask = self.asked[-1]
            for sequence, payload in engine.ring(ask.sequence):
                if keep(sequence):
                    self.take(self.sequencer.replayed(ask.number, sequence, payload))
            self.take(self.sequencer.replay_ended(ask.number))

    def refuse(self) -> None:
        """Leave the newest request, and those that follow from it, unanswered."""
        answers = 0
        while self.sequencer.replaying:
            answers += 1
            assert answers < 100, "an endless loop of requests"  # each hole costs two
            self.take(self.sequencer.replay_ended(self.asked[-1].number, answered=False))
