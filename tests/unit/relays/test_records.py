"""What a mirror has to say, as records. Blocks have four tokens."""

import pytest

from relays.engine_events import Cleared
from relays.mirror import Mirror
from relays.records import Voice
from schemas.events import (
    MAX_RECORD_BYTES,
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    HolderCleared,
    ProfileChanged,
    Record,
    encode_record,
)
from tests.support.engines import HOLDER, chain, pairs, profile, removed, stored, tokens
from tests.support.records import gone, run

A, B, C = chain(tokens(3))


def new() -> tuple[Mirror, Voice]:
    """Return a mirror and a voice that has told its profile."""
    mirror, voice = Mirror(profile(clear_scope="device")), Voice(HOLDER, 7)
    mirror.apply([stored([1000], tokens(1, first=90_000))])
    mirror.apply([removed(1000)])
    list(voice.speak(mirror, {}, 0.0))
    return mirror, voice


def said(mirror: Mirror, voice: Voice, sequence: int = 1) -> list[Record]:
    return list(voice.speak(mirror, {"0": sequence}, 0.5))


def test_the_profile_comes_first_and_again_when_it_changed() -> None:
    """The first record tells the profile, and so does the one after it learnt a tier."""
    mirror, voice = Mirror(profile()), Voice(HOLDER, 7)
    (first,) = said(mirror, voice)
    assert first.events == (ProfileChanged(profile()),)
    mirror.apply([stored([1], tokens(1), tier="host")])
    (second,) = said(mirror, voice, 2)
    assert second.events[0] == ProfileChanged(mirror.profile)
    assert mirror.profile.pairs == pairs((profile().groups[0].group_class, "host"))
    (third,) = said(mirror, voice, 3)
    assert third.events == ()


def test_a_run_is_one_event_and_nothing_new_is_no_record() -> None:
    """Three new blocks are one run; speaking again with nothing new yields no record."""
    mirror, voice = new()
    mirror.apply([stored([1, 2, 3], tokens(3))])
    (record,) = said(mirror, voice)
    assert (record.life, record.sequence, record.engine_sequence) == (7, 2, {"0": 1})
    assert record.events == (run([A, B, C]),)
    assert said(mirror, voice) == []


def test_a_removal_names_its_place() -> None:
    """A block that is gone is told with its depth and the path to it."""
    mirror, voice = new()
    mirror.apply([stored([1, 2, 3], tokens(3))])
    said(mirror, voice)
    mirror.apply([removed(3)])
    (record,) = said(mirror, voice, 2)
    assert record.events == (gone([C], depth=2),)
    assert record.paths == (A.to_bytes(8, "little") + B.to_bytes(8, "little"),)


def test_runs_below_one_block_share_a_path() -> None:
    """Branches that leave one chain name one path, the deepest one."""
    mirror, voice = new()
    mirror.apply([stored([1, 2, 3], tokens(3))])
    said(mirror, voice)
    mirror.apply([stored([10 + n], tokens(1, first=100 * n), parent=3 - n % 2) for n in range(1, 9)])
    (record,) = said(mirror, voice, 2)
    assert len(record.events) == 8
    assert record.paths == (b"".join(block.to_bytes(8, "little") for block in (A, B, C)),)


def test_a_path_begins_at_its_band() -> None:
    """A run at depth 130 brings the two hashes from depth 128 on, not the 130 before it."""
    mirror, voice = new()
    mirror.apply([stored(range(1, 131), tokens(130))])
    said(mirror, voice)
    mirror.apply([stored([500], tokens(1, first=1 + 130 * 4), parent=130)])
    (record,) = said(mirror, voice, 2)
    hashes = chain(tokens(131))
    assert record.events == (run(hashes[130:], depth=130),)
    assert record.paths == (b"".join(block.to_bytes(8, "little") for block in hashes[128:130]),)


def test_a_run_at_a_bands_start_needs_no_path() -> None:
    """A run at depth 128 brings no path."""
    mirror, voice = new()
    mirror.apply([stored(range(1, 129), tokens(128))])
    said(mirror, voice)
    mirror.apply([stored([500], tokens(1, first=1 + 128 * 4), parent=128)])
    (record,) = said(mirror, voice, 2)
    assert record.paths == ()
    assert record.events == (run(chain(tokens(129))[128:], depth=128),)


def test_a_clear_stands_before_what_came_after_it() -> None:
    """The record of a clear holds the clear and then the blocks stored behind it."""
    mirror, voice = new()
    mirror.apply([stored([1, 2], tokens(2))])
    said(mirror, voice)
    mirror.apply([Cleared(), stored([1], tokens(1))])
    (record,) = said(mirror, voice, 2)
    assert record.events == (HolderCleared(), run([A]))


def test_a_step_without_news_still_tells_its_sequence() -> None:
    """An engine step that changed nothing yields a record that only carries the engine's sequence."""
    mirror, voice = new()
    (record,) = said(mirror, voice, 41)
    assert (record.events, record.engine_sequence) == ((), {"0": 41})
    assert said(mirror, voice, 41) == []


def test_a_heartbeat_repeats_the_last_sequence() -> None:
    """A heartbeat takes no sequence and completes no engine sequence."""
    mirror, voice = new()
    (record,) = said(mirror, voice)
    beat = voice.beat(Heartbeat("live", {"0": 5}), 1.5)
    assert (beat.sequence, beat.engine_sequence, beat.engine_time_s) == (record.sequence, {}, 1.5)
    assert said(mirror, voice, 2)[0].sequence == record.sequence + 1


@pytest.fixture(scope="module")
def long_story() -> tuple[Mirror, list[Record]]:
    """A mirror with 150,000 blocks in short branches, and the records that tell of them."""
    mirror, voice = new()
    trunk = stored(range(1, 101), tokens(100))
    branches = [
        stored(range(1000 + 5 * n, 1005 + 5 * n), tokens(5, first=10_000 + 20 * n), parent=100 - n % 20)
        for n in range(30_000)
    ]
    mirror.apply([trunk, *branches])
    return mirror, said(mirror, voice, 77)


def test_a_long_story_is_cut_into_records_below_the_brokers_limit(long_story: tuple[Mirror, list[Record]]) -> None:
    """150,000 blocks in 30,000 runs become several records below 1 MB that hold every block once."""
    mirror, records = long_story
    assert len(records) > 4
    assert all(len(encode_record(record)) <= MAX_RECORD_BYTES for record in records)
    events = [event for record in records for event in record.events]
    told: list[int] = []
    for event in events:
        assert isinstance(event, BlocksStored | BlocksRemoved)
        told += [int.from_bytes(event.blocks[at : at + 8], "little") for at in range(0, len(event.blocks), 8)]
    assert len(told) == len(set(told)) == 150_100
    assert set(told) == {block for block, _ in mirror.resident()}


def test_only_the_last_record_completes_the_engines_sequence(long_story: tuple[Mirror, list[Record]]) -> None:
    """Until all of a step is told, no record says that the step is complete; record sequences have no hole."""
    _, records = long_story
    assert [record.engine_sequence for record in records[:-1]] == [{}] * (len(records) - 1)
    assert records[-1].engine_sequence == {"0": 77}
    assert [record.sequence for record in records] == list(range(2, 2 + len(records)))
