"""One publisher in one life as a relay hears it: sequence, replays, mirror and records."""

from collections.abc import Iterable, Sequence

from relays.decoders import Decode
from relays.engine import EngineRank
from relays.pulled import PulledSequence
from relays.sequence import Action, Ask, Deliver, NewLife, Sequencer
from relays.sockets import END_MARK, unframe_replay
from relays.trtllm import split_drain
from schemas.errors import FrameError
from schemas.events import MAX_NUMBER, HolderState, encode_record
from schemas.profiles import Holder, Profile
from tests.cases.notation import DRAINED, Body, Control, Message
from tests.cases.profiles import body_of, envelope

_LIVES = 1 << 20  # of the relay, within one life of the replica
_ROUNDS = 16  # of questions and answers; more would be an endless replay


class NotationRank(EngineRank):
    """An engine's rank whose messages are those of a case."""

    def __init__(self, profile: Profile, holder: Holder, life: int, decode: Decode) -> None:
        super().__init__(profile, holder, life)
        self.decode = decode


class Source:
    """Turns what one publisher said in one life of its replica into encoded records.

    The ring of the engine holds what the case says that it published; as long as that has no hole, questions are
    answered at once, else the case's next `replay` does it, and where there is none nobody answers.
    """

    def __init__(
        self, profile: Profile, holder: Holder, decode: Decode, *, life: int, replays: int, log: Iterable[Message]
    ) -> None:
        self.engine = NotationRank(profile, holder, life * _LIVES, decode)
        self.replays = replays  # that the case still has for this publisher
        self.refused = 0  # messages that are none, or whose number is
        self.logged = False
        self._log = {message.sequence: message for message in log if message.sequence is not None}
        self._records: dict[int, list[bytes]] = {}  # of the log, by sequence
        self._has_ring = replays > 0
        self._pulled = PulledSequence(profile.window_sizes)
        self._stamp = 0
        self._asked: Ask | None = None
        self._history: dict[int, bytes] = {}  # what the present process published
        self._newest = -1  # highest sequence of it
        self._base = -1  # it is known from here on
        self._covered = -1  # by a snapshot: what comes up to here is old
        self._begin_sequence()

    # ---- what it says to the index

    def say(self, state: HolderState = "live") -> list[bytes]:
        """Return the records that tell what is new, and a heartbeat."""
        return [*self.speak(), encode_record(self.engine.beat(state))]

    def speak(self) -> list[bytes]:
        """Return the records that tell what is new."""
        return [encode_record(record) for record in self.engine.speak()]

    def say_again(self) -> list[bytes]:
        """Return records that tell all that is known, in a higher life: the index lost some."""
        self.engine.say_again(self.engine.voice.life + 1)
        return self.say()

    # ---- what it hears

    def hear(self, message: Message) -> None:
        """Take a live message, or the events that the engine gave when it was asked."""
        if message.body.engine == DRAINED:
            self._pull(message.body.data)
            return
        sequence = self._newest + 1 if message.sequence is None else message.sequence
        if not 0 <= sequence <= MAX_NUMBER:
            self.refused += 1
            return
        if sequence <= self._covered:
            return  # part of the snapshot
        self._covered = -1
        payload = self._payload(sequence, message.body) if sequence == self._newest else self._stamped(message.body)
        if sequence < self._newest or self._history.get(sequence, payload) != payload:
            # a live stream never goes back by itself: another process, another ring
            self._history.clear()
            self._base = -1
        self._history[sequence] = payload
        self._newest = sequence
        self._act(self._sequencer.live(sequence, payload))
        self._answer_what_is_known()

    def _pull(self, data: bytes) -> None:
        try:
            drained, _ = split_drain(data)
        except FrameError:
            self.refused += 1
            return
        for event in drained:
            heard = self._pulled.take(event.event_id, event.window, created=event.created)
            if heard.ended is not None:
                self.engine.begin_life(self.engine.voice.life + 1)
            if heard.applies:
                self.engine.take(event.event_id, envelope(0, Body(event.payload, DRAINED)))

    def read_log(self, message: Message) -> list[bytes]:
        """Return the records that the relay made of this message, which it heard in order, when it was in turn."""
        self.logged = True
        if message.sequence is None:
            self.hear(message)
            return self.speak()
        for sequence in sorted(number for number in self._log if number <= message.sequence):
            if sequence not in self._records:
                self.hear(self._log[sequence])
                self._records[sequence] = self.speak()
        return self._records[message.sequence]

    def replay(self, control: Control) -> None:
        """Take what the engine answers to a replay."""
        self.replays -= 1
        told = self._read_replay(control.messages)
        if self._asked is None:
            self._act(self._sequencer.probe())
        for _ in range(_ROUNDS):
            if self._asked is None:
                return
            ask, restarted = self._asked, False
            for sequence, payload in self._ring(ask, control.asked, told):
                self._history[sequence] = payload
                self._newest = max(self._newest, sequence)
                actions = self._sequencer.replayed(ask.number, sequence, payload)
                self._act(actions)
                restarted = NewLife("restarted") in actions
                if self._asked != ask:
                    break
            if restarted:
                self._history = dict(told)
                self._newest = max(self._history, default=-1)
                self._base = -1
            if self._asked == ask:
                self._asked = None
                self._act(self._sequencer.replay_ended(ask.number, answered=control.ended))
                if not control.ended:
                    return

    def take_snapshot(self, message: Message) -> None:
        """Take a listing of all that the publisher has, up to a sequence; what was heard beyond it stays in line."""
        covered = max(self._newest, 0) if message.sequence is None else message.sequence
        later = {sequence: payload for sequence, payload in self._history.items() if sequence > covered}
        self.engine.begin_life(self.engine.voice.life + 1)
        self._begin_sequence()
        self._covered = self._base = covered
        self._newest = max(later, default=covered)
        self._act(self._sequencer.connect())
        if self._asked is not None:
            number, self._asked = self._asked.number, None
            self._act(self._sequencer.replayed(number, covered, self._stamped(message.body)))
            self._act(self._sequencer.replay_ended(number))
        for sequence in sorted(later):
            self._act(self._sequencer.live(sequence, later[sequence]))
        self._history = later
        self._answer_what_is_known()

    # ---- steps

    def _begin_sequence(self) -> None:
        self._sequencer = Sequencer(has_ring=self._has_ring)
        self._asked = None
        self._history = {}
        self._newest = self._base = self._covered = -1
        self._act(self._sequencer.connect())
        self._answer_what_is_known()

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(sequence, payload):
                    self.engine.take(sequence, payload)
                case NewLife():
                    self.engine.begin_life(self.engine.voice.life + 1)
                case Ask():
                    self._asked = action

    def _answer_what_is_known(self) -> None:
        for _ in range(_ROUNDS):
            ask = self._asked
            whole = len(self._history) == self._newest - self._base
            if ask is None or (self._has_ring and not whole and self.replays > 0):
                return
            self._asked = None
            answered = self._has_ring and whole
            for sequence in sorted(self._history) if answered else ():
                if sequence >= ask.sequence:
                    self._act(self._sequencer.replayed(ask.number, sequence, self._history[sequence]))
            self._act(self._sequencer.replay_ended(ask.number, answered=answered))

    def _ring(self, ask: Ask, asked: int, told: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Return the answer to a question that may reach further back than the one that the case answers."""
        if told and told[0][0] != asked:
            return list(told)
        before = [number for number in sorted(self._history) if ask.sequence <= number < asked]
        return [*((number, self._history[number]) for number in before), *told]

    def _read_replay(self, messages: Sequence[Message]) -> list[tuple[int, bytes]]:
        """Return the replay's messages up to the end mark, from frames with and without a topic."""
        told: list[tuple[int, bytes]] = []
        for position, message in enumerate(messages):
            number = message.sequence or 0
            head = [b""] if position % 2 else [b"", b"topic"]
            sequence, payload = unframe_replay([*head, number.to_bytes(8, "big"), self._payload(number, message.body)])
            if sequence == END_MARK:
                break
            told.append((sequence, payload))
        return told

    def _payload(self, sequence: int, body: Body) -> bytes:
        """Return the very message that was published before, if this is it."""
        known = self._history.get(sequence)
        return known if known is not None and body_of(known) == body else self._stamped(body)

    def _stamped(self, body: Body) -> bytes:
        self._stamp += 1
        return envelope(self._stamp, body)
