"""The sequencer beside an engine that loses, repeats, forgets and restarts, and a wire that answers late."""

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relays.sequence import Sequencer
from tests.support.ringed_engine import Listener, RingedEngine


class SequencerMachine(RuleBasedStateMachine):
    """Any conversation; whatever was lost, an answered replay at the end brings the life up to the engine."""

    @initialize(ring=st.sampled_from([1, 4, 12, 1000]), buffer=st.sampled_from([1, 5, 1000]))
    def begin(self, ring: int, buffer: int) -> None:
        self.engine = RingedEngine(ring)
        self.listener = Listener(Sequencer(buffer))
        self.connected = False
        self.last_live: tuple[int, bytes] | None = None
        self.read = 0  # the newest request that the engine has read
        self.answers: dict[int, list[tuple[int, bytes]]] = {}  # request -> what is still on its way
        self.all: dict[tuple[int, int], bytes] = {}
        self.whole = True  # all of this run could be had so far

    @rule()
    def connect(self) -> None:
        """The relay's socket reaches the engine that runs now."""
        self.connected = True
        self.last_live = None
        self.listener.take(self.listener.sequencer.connect())

    @rule()
    def disconnect(self) -> None:
        """The connection breaks."""
        self.connected = False
        self.last_live = None
        self.listener.sequencer.disconnect()

    @rule(count=st.integers(1, 6), heard=st.integers(0, 63))
    def publish(self, count: int, heard: int) -> None:
        """Messages go out; those whose bit is set arrive, if there is a connection."""
        for number in range(count):
            sequence, payload = self.engine.publish()
            self.all[self.engine.run, sequence] = payload
            self.whole &= len(self.engine.ring(0)) == self.engine.next
            if self.connected and heard >> number & 1:
                self.last_live = sequence, payload
                self.listener.take(self.listener.sequencer.live(sequence, payload))

    @precondition(lambda self: self.last_live is not None)
    @rule()
    def repeat(self) -> None:
        """The last message arrives twice."""
        assert self.last_live is not None
        self.listener.take(self.listener.sequencer.live(*self.last_live))

    @rule()
    def burn(self) -> None:
        """A number is used up by a message that is never sent."""
        self.engine.burn()
        self.whole = False

    @rule(messages=st.integers(0, 14))
    def restart(self, messages: int) -> None:
        """The engine restarts, and publishes before anybody is connected again."""
        self.disconnect()
        self.engine.restart()
        self.whole = True
        self.publish(messages, 0)

    @rule()
    def probe(self) -> None:
        """The source has been quiet."""
        self.listener.take(self.listener.sequencer.probe())

    @precondition(lambda self: self.listener.asked and self.listener.asked[-1].number > self.read)
    @rule(lost=st.just(set()) | st.sets(st.integers(0, 40)), overlap=st.integers(0, 3))
    def begin_answer(self, lost: set[int], overlap: int) -> None:
        """The engine reads the newest request; its answer may begin early and loses messages on the way."""
        ask = self.listener.asked[-1]
        self.read = ask.number
        ring = self.engine.ring(max(0, ask.sequence - overlap))
        self.answers[ask.number] = [message for message in ring if message[0] not in lost]
        self.whole &= len(self.answers[ask.number]) == len(ring)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), count=st.integers(1, 8))
    def go_on_answering(self, data: st.DataObject, count: int) -> None:
        """Some of an answer arrives, be it the newest request's or an old one's; at its end comes the mark."""
        number = data.draw(st.sampled_from(sorted(self.answers)))
        for _ in range(count):
            if not self.answers[number]:
                del self.answers[number]
                self.listener.take(self.listener.sequencer.replay_ended(number))
                return
            sequence, payload = self.answers[number].pop(0)
            self.listener.take(self.listener.sequencer.replayed(number, sequence, payload))

    @precondition(lambda self: self.listener.asked)
    @rule()
    def lose_patience(self) -> None:
        """Nothing answers the newest request."""
        ask = self.listener.asked[-1]
        self.listener.take(self.listener.sequencer.replay_ended(ask.number, answered=False))
        self.whole = False

    @invariant()
    def every_life_is_of_one_run(self) -> None:
        """All messages of a life are those that one run of the engine published, numbers and bytes."""
        runs = {int(payload.split(b":")[0]) for _, payload in self.listener.life}
        assert len(runs) <= 1
        for sequence, payload in self.listener.life:
            assert self.all[next(iter(runs)), sequence] == payload

    def teardown(self) -> None:
        """With a connection and replays that lose nothing, the life is the engine's, up to its newest message."""
        if not hasattr(self, "engine"):
            return
        self.connect()
        self.listener.answer(self.engine)
        self.publish(1, 1)
        self.listener.answer(self.engine)
        self.listener.take(self.listener.sequencer.probe())
        self.listener.answer(self.engine)
        self.every_life_is_of_one_run()
        assert self.listener.life[-1] == (self.engine.next - 1, b"%d:%d" % (self.engine.run, self.engine.next - 1))
        if self.whole:
            assert self.listener.life[0][0] == 0
        assert self.listener.sequencer.verified
        assert self.listener.sequencer.caught_up
        count = len(self.listener.asked)
        self.listener.take(self.listener.sequencer.probe())
        self.listener.answer(self.engine)
        assert len(self.listener.asked) == count + 1


SequencerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestSequencer = SequencerMachine.TestCase


@given(steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 255), st.sampled_from(["", "probe", "restart"]))))
def test_a_ring_that_holds_everything_leaves_no_hole(steps: list[tuple[int, int, str]]) -> None:
    """Where only live messages are lost, every run is delivered whole and no life ends early."""
    engine, listener = RingedEngine(ring=10_000), Listener()
    listener.take(listener.sequencer.connect())
    listener.answer(engine)
    for count, heard, event in steps:
        for number in range(count):
            message = engine.publish()
            if heard >> number & 1:
                listener.take(listener.sequencer.live(*message))
                listener.answer(engine)
        if event == "probe":
            listener.take(listener.sequencer.probe())
        elif event == "restart":
            engine.restart()
            listener.take(listener.sequencer.connect())
        listener.answer(engine)
        if event:
            assert listener.life == engine.ring(0)
    assert set(listener.lives) <= {"restarted"}
