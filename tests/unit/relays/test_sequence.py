"""Gaps, repeats, replays and lives, one situation each; C01, C02, C04 and C11 are cases from public bug reports."""

import pytest

from relays.engine import EngineRank
from relays.sequence import Ask, Deliver, NewLife, Sequencer
from tests.support.engines import HOLDER, chain, profile, resident, tokens
from tests.support.payloads import batch, map_removed, pack
from tests.support.ringed_engine import Listener, RingedEngine
from tests.support.vllm_frames import map_stored


def listening(published: int = 0, *, ring: int = 1000, buffer: int = 1000) -> tuple[RingedEngine, Listener]:
    """Return an engine and who has heard everything of it so far."""
    engine, listener = RingedEngine(ring), Listener(Sequencer(buffer))
    for _ in range(published):
        engine.publish()
    listener.take(listener.sequencer.connect())
    listener.answer(engine)
    return engine, listener


def hear(engine: RingedEngine, listener: Listener, count: int = 1) -> None:
    """Let the engine publish, and the listener hear it."""
    for _ in range(count):
        listener.take(listener.sequencer.live(*engine.publish()))


def lose(engine: RingedEngine, count: int = 1) -> None:
    """Let the engine publish what is lost on the way."""
    for _ in range(count):
        engine.publish()


def test_what_was_published_before_comes_from_the_ring() -> None:
    """A connection asks for everything, and live messages follow without a gap."""
    engine, listener = listening(3)
    assert [ask.sequence for ask in listener.asked] == [0]
    hear(engine, listener)
    assert listener.sequences == [0, 1, 2, 3]
    assert listener.sequencer.caught_up
    assert listener.sequencer.verified


def test_live_messages_wait_for_the_replay() -> None:
    """What is published while the ring is read is delivered after it, in order and once."""
    engine, listener = RingedEngine(), Listener()
    lose(engine, 2)
    listener.take(listener.sequencer.connect())
    hear(engine, listener, 2)
    assert listener.sequences == []
    listener.answer(engine)
    assert listener.sequences == [0, 1, 2, 3]


def test_an_engine_that_published_nothing_is_caught_up() -> None:
    """An end mark alone is the whole of an idle engine's ring."""
    engine, listener = listening()
    assert listener.sequencer.caught_up
    hear(engine, listener)
    assert listener.sequences == [0]
    assert listener.lives == []


def test_a_gap_is_filled_from_the_ring() -> None:
    """Lost messages are asked for and delivered before the one that revealed them."""
    engine, listener = listening(2)
    lose(engine, 2)
    hear(engine, listener)
    listener.answer(engine)
    assert listener.sequences == [0, 1, 2, 3, 4]
    assert listener.lives == []


def test_every_replay_is_asked_from_the_last_message() -> None:
    """So that each of them shows whether it is still the same engine."""
    engine, listener = listening(5)
    lose(engine)
    hear(engine, listener)
    assert listener.asked[-1].sequence == 4


def test_a_replay_that_loses_messages_is_asked_again() -> None:
    """An end mark proves nothing; the second replay goes on where the first broke off."""
    engine, listener = listening(1)
    lose(engine, 8)
    hear(engine, listener)
    ask = listener.asked[-1]
    for sequence, payload in engine.ring(ask.sequence):
        if sequence not in (4, 5):
            listener.take(listener.sequencer.replayed(ask.number, sequence, payload))
    listener.take(listener.sequencer.replay_ended(ask.number))
    assert listener.sequences == [0, 1, 2, 3]
    assert listener.asked[-1] == Ask(3, ask.number + 1)
    listener.answer(engine)
    assert listener.sequences == list(range(10))
    assert listener.lives == []


def test_c02_an_overlapping_replay_applies_nothing_twice() -> None:
    """The true history is store, remove, store, store, remove: block a has one copy before its last removal."""
    history = [
        batch(map_stored()),
        batch(map_removed()),
        batch(map_stored()),
        batch(map_stored(block_hashes=[12], token_ids=[5, 6, 7, 8], parent_block_hash=11)),
        batch(map_removed()),
    ]
    payloads = [pack(value) for value in history]
    rank, sequencer = EngineRank(profile(), HOLDER, life=1), Sequencer()
    sequencer.connect()
    sequencer.replay_ended(1)

    def take(actions: object) -> None:
        assert isinstance(actions, list)
        for action in actions:
            if isinstance(action, Deliver):
                rank.take(action.sequence, action.payload)

    take(sequencer.live(0, payloads[0]))
    take(sequencer.live(3, payloads[3]))
    for sequence in range(4):
        take(sequencer.replayed(2, sequence, payloads[sequence]))
    take(sequencer.replay_ended(2))
    a, b = chain(tokens(2))
    assert set(resident(rank.mirror)) == {a, b}
    take(sequencer.live(4, payloads[4]))
    assert set(resident(rank.mirror)) == {b}


def test_c01_a_step_back_ends_the_life() -> None:
    """A live stream never goes back by itself: all is retracted before the new message is applied."""
    engine, listener = listening(2)
    engine.restart()
    hear(engine, listener)
    assert listener.lives == ["sequence_back"]
    listener.answer(engine)
    assert listener.life == [(0, b"1:0")]


def test_c01_a_source_is_alone_with_its_numbers() -> None:
    """Another engine's step back is nothing to this one."""
    first, second = listening(2), listening(1)
    first[0].restart()
    hear(*first)
    hear(*second)
    assert second[1].sequences == [0, 1]
    assert second[1].lives == []


@pytest.mark.parametrize("answered", [True, False])
def test_c04_a_number_never_sent_is_asked_for_twice_at_most(answered: bool) -> None:
    """What is known from before the hole cannot be trusted, what follows can; later messages are plain next ones."""
    engine, listener = listening(1)
    engine.burn()
    before = len(listener.asked)
    hear(engine, listener)
    if answered:
        listener.answer(engine)
    else:
        listener.refuse()
    assert len(listener.asked) - before == 2
    assert listener.lives == ["hole"]
    assert listener.sequences == [2]
    hear(engine, listener)
    assert listener.sequences == [2, 3]
    assert not listener.sequencer.replaying


def test_c11_a_lost_last_message_shows_in_a_probe() -> None:
    """The engine is idle, so nothing else would reveal it."""
    engine, listener = listening(2)
    lose(engine)
    listener.take(listener.sequencer.probe())
    listener.answer(engine)
    assert listener.sequences == [0, 1, 2]
    assert listener.lives == []


def test_a_probe_of_an_engine_that_is_up_to_date_changes_nothing() -> None:
    """It costs one request, whose answer is the last message again."""
    engine, listener = listening(2)
    before = len(listener.asked)
    listener.take(listener.sequencer.probe())
    listener.answer(engine)
    assert len(listener.asked) == before + 1
    assert listener.sequences == [0, 1]
    assert listener.lives == []


@pytest.mark.parametrize("published", [0, 1, 2, 3, 9])
def test_a_restarted_engine_shows_in_a_probe(published: int) -> None:
    """Whether it has published fewer messages than before, as many or more: none of the old life stays."""
    engine, listener = listening(3)
    engine.restart()
    lose(engine, published)
    listener.take(listener.sequencer.probe())
    listener.answer(engine)
    assert listener.lives == ["restarted"]
    assert listener.life == engine.ring(0)
    assert listener.sequencer.caught_up


def test_a_restarted_engine_shows_in_a_gap() -> None:
    """Its messages fit behind the old ones by their numbers, but the last message does not come again."""
    engine, listener = listening(3)
    engine.restart()
    lose(engine, 4)
    listener.take(listener.sequencer.connect())
    hear(engine, listener)
    listener.answer(engine)
    assert listener.lives == ["restarted"]
    assert listener.life == engine.ring(0)


def test_a_restarted_engine_that_forgot_its_beginning_is_a_new_life() -> None:
    """Its ring begins exactly behind the last message, which alone would look like the next one."""
    engine, listener = listening(3, ring=2)
    engine.restart()
    lose(engine, 5)
    listener.take(listener.sequencer.connect())
    listener.answer(engine)
    assert listener.lives == ["unverified"]
    assert listener.life == [(3, b"1:3"), (4, b"1:4")]


def test_a_ring_that_forgot_the_hole_begins_a_life_behind_it() -> None:
    """Nobody can tell what was in the messages that are gone."""
    engine, listener = listening(2, ring=3)
    lose(engine, 5)
    hear(engine, listener)
    listener.answer(engine)
    assert listener.lives == ["hole"]
    assert listener.sequences == [5, 6, 7]


def test_answers_to_an_older_request_do_not_count() -> None:
    """A replay reveals a restart; what is left of it would make the new life begin in its middle."""
    engine, listener = listening(3)
    engine.restart()
    lose(engine, 6)
    listener.take(listener.sequencer.probe())
    old = listener.asked[-1]
    for sequence, payload in engine.ring(old.sequence):
        listener.take(listener.sequencer.replayed(old.number, sequence, payload))
    listener.take(listener.sequencer.replay_ended(old.number))
    assert listener.life == []
    listener.answer(engine)
    assert listener.life == engine.ring(0)


def test_a_new_connection_is_verified_before_anything_counts() -> None:
    """A live message with the next number may be another engine's."""
    engine, listener = listening(3)
    listener.sequencer.disconnect()
    listener.take(listener.sequencer.connect())
    hear(engine, listener)
    assert listener.sequences == [0, 1, 2]
    assert not listener.sequencer.verified
    listener.answer(engine)
    assert listener.sequences == [0, 1, 2, 3]
    assert listener.lives == []


def test_a_new_connection_replaces_a_replay_that_is_not_answered() -> None:
    """The request went to the engine that died; the new one is asked at once, not after our patience."""
    engine, listener = listening(3)
    listener.take(listener.sequencer.probe())
    engine.restart()
    lose(engine, 2)
    listener.take(listener.sequencer.connect())
    listener.answer(engine)
    assert listener.lives == ["restarted"]
    assert listener.life == engine.ring(0)


def test_an_engine_that_cannot_be_verified_is_a_new_life() -> None:
    """Its ring never answers: what follows is delivered, what is known from before is doubted."""
    engine, listener = listening(3)
    listener.take(listener.sequencer.connect())
    hear(engine, listener)
    listener.refuse()
    assert listener.lives == ["unverified"]
    assert listener.sequences == [3]


def test_a_source_without_ring_goes_on_over_connections() -> None:
    """As long as its sequence does; a step back is a new life as ever, and a gap too."""
    engine, listener = RingedEngine(), Listener(Sequencer(has_ring=False))
    listener.take(listener.sequencer.connect())
    listener.refuse()
    hear(engine, listener, 2)
    listener.refuse()
    listener.take(listener.sequencer.connect())
    hear(engine, listener)
    listener.refuse()
    assert listener.sequences == [0, 1, 2]
    assert not listener.sequencer.verified
    lose(engine)
    hear(engine, listener)
    listener.refuse()
    assert listener.lives == ["hole"]
    assert listener.sequences == [4]


def test_messages_beyond_the_buffer_are_replayed() -> None:
    """A full buffer drops what comes, and the ring gives it back without any new message."""
    engine, listener = listening(1, buffer=2)
    lose(engine)
    hear(engine, listener, 6)
    listener.answer(engine)
    assert listener.sequences == list(range(8))
    assert listener.lives == []


def test_a_repeated_message_is_dropped() -> None:
    """Delivered or still held: the same bytes under the same number are the same message."""
    engine, listener = listening(1)
    message = engine.publish()
    for _ in range(2):
        listener.take(listener.sequencer.live(*message))
    lose(engine)
    message = engine.publish()
    for _ in range(2):
        listener.take(listener.sequencer.live(*message))
    listener.answer(engine)
    assert listener.sequences == [0, 1, 2, 3]
    assert listener.lives == []


def test_one_absurd_number_costs_one_life() -> None:
    """The next valid message is a step back, and the ring gives everything again."""
    engine, listener = listening(2)
    listener.take(listener.sequencer.live(1 << 40, b"garbage"))
    hear(engine, listener)
    listener.answer(engine)
    assert listener.lives == ["sequence_back"]
    assert listener.life == engine.ring(0)


def test_nothing_is_retracted_twice() -> None:
    """A life of which nothing was delivered yet ends without a word."""
    engine, listener = listening(2)
    engine.restart()
    assert any(isinstance(action, NewLife) for action in listener.sequencer.live(*engine.publish()))
    engine.restart()
    assert not any(isinstance(action, NewLife) for action in listener.sequencer.live(0, b"2:0"))
