"""Laws of the fold and of the memory store: delivered twice = once, batches = singles."""

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relays.engine_events import EngineEvent
from relays.records import Voice
from schemas.events import Heartbeat, HolderCleared, Record
from schemas.profiles import Holder
from tests.support.replayed import Row, memory_store, state_of, tell
from tests.support.stories import configured, stories

HOLDERS = [Holder("r", 0), Holder("r", 1), Holder("node7", None)]


@st.composite
def streams(draw: st.DrawFn) -> list[Record]:
    """Draw one partition: records of several holders, with lives, clears and heartbeats, in a legal order."""
    spoken: list[list[Record]] = []
    for holder in HOLDERS[: draw(st.integers(1, 3))]:
        row = Row(configured(clear_scope=draw(st.sampled_from(["device", "all"]))), holder=holder)
        for batch in draw(stories()):
            _step(draw, row, batch)
        spoken.append(row.records)
    merged: list[Record] = []
    while any(spoken):
        queue = draw(st.sampled_from([records for records in spoken if records]))
        merged.append(queue.pop(0))
    return merged


def _step(draw: Any, row: Row, batch: list[EngineEvent]) -> None:
    row.apply(batch)
    match draw(st.integers(0, 9)):
        case 0:  # the engine started anew
            row.mirror.forget()
            row.voice = Voice(row.voice.holder, row.voice.life + 1)
            row.speak()
        case 1 | 2 if row.voice.sequence:  # a relay speaks before it says that it is alive
            row.records.append(row.voice.beat(Heartbeat("live", {"0": row.step}), float(row.step)))
        case _:
            row.speak()


@given(streams(), st.data())
@settings(max_examples=150, deadline=None)
def test_folding_in_batches_is_folding_one_by_one(stream: list[Record], data: st.DataObject) -> None:
    """However a partition is cut into flushes, the store ends in one state."""
    singles, batches = memory_store(), memory_store()
    for record in stream:
        tell(singles, [record])
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 6), label="flush")
        tell(batches, stream[at : at + size])
        at += size
    assert state_of(singles) == state_of(batches)


@given(streams(), st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_delivered_twice_counts_once(stream: list[Record], data: st.DataObject) -> None:
    """A partition that is read again from any earlier offset, at any time, ends in the state of one reading."""
    once, again = memory_store(), memory_store()
    tell(once, stream)
    for stop in sorted(data.draw(st.lists(st.integers(1, max(1, len(stream))), max_size=3), label="stops")):
        start = data.draw(st.integers(0, stop - 1), label="back to")
        tell(again, stream[start if start <= _reached(again, stream) else 0 : stop])
    tell(again, stream)
    assert _without_beats(state_of(again)) == _without_beats(state_of(once))


def _reached(store: Any, stream: list[Record]) -> int:
    """Return up to which position the stream may be read from without a hole."""
    known = {row["holder"]: (row["life"], row["sequence"]) for row in state_of(store).values()}
    for position, record in enumerate(stream):
        if (record.life, record.sequence) > known.get(record.holder, (0, 0)):
            return position
    return len(stream)


def _without_beats(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a heartbeat says: an older one that is read again is newer news to the store."""
    beat = ("received", "state", "share_known", "reason", "age_s")
    return {holder: {name: value for name, value in row.items() if name not in beat} for holder, row in state.items()}


@given(streams(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_record_that_is_lost_is_noticed(stream: list[Record], data: st.DataObject) -> None:
    """Losing a record that others of its epoch follow marks the holder as broken."""
    losses = [position for position in range(len(stream)) if _is_missed(stream, position)]
    assume(losses)
    lost = data.draw(st.sampled_from(losses))
    store = memory_store()
    tell(store, [*stream[:lost], *stream[lost + 1 :]])
    assert state_of(store)[str(stream[lost].holder)]["broken"]


def _is_missed(stream: list[Record], position: int) -> bool:
    """Return whether the record has news, more news of its life follows, and nothing after it starts afresh."""
    lost = stream[position]
    later = [record for record in stream[position + 1 :] if record.holder == lost.holder and not _is_beat(record)]
    afresh = any(
        record.life > lost.life or any(isinstance(event, HolderCleared) for event in record.events) for record in later
    )
    return bool(later) and not afresh and not _is_beat(lost)


def _is_beat(record: Record) -> bool:
    return any(isinstance(event, Heartbeat) for event in record.events)
