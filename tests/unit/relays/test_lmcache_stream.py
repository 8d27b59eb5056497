"""Where a subscriber stands in a server's log, by what the real server sent."""

import pytest

from relays.lmcache_mp import KvBatch
from relays.pools.lmcache_stream import Step, StreamCursor, target_of
from schemas.errors import ConfigError
from tests.support.lmcache_frames import message, read, recorded


def batch(incarnation: int, position: int, *, lost: bool = False) -> KvBatch:
    return read(message(incarnation=incarnation, next_cursor=position, lost=lost))


def took(cursor: StreamCursor, *batches: KvBatch) -> list[Step]:
    return [cursor.take(each) for each in batches]


def test_batches_of_one_run_follow_each_other() -> None:
    """The cursor is the next subscription's; another one of the same run goes on from there."""
    cursor = StreamCursor()
    assert took(cursor, batch(1, 0), batch(1, 4), batch(1, 9)) == ["next"] * 3
    assert cursor.position == 9
    assert took(cursor, batch(1, 9)) == ["next"]


def test_a_loss_is_passed_on_and_the_stream_goes_on_behind_it() -> None:
    """Whether anything has to be withdrawn is not the cursor's to know."""
    cursor = StreamCursor()
    assert took(cursor, batch(1, 4, lost=True), batch(1, 5), batch(1, 9, lost=True)) == ["lost", "next", "lost"]
    assert cursor.position == 9


def test_another_run_is_read_from_its_start() -> None:
    """The cursor of the run before hides records of this one, whether it was above them (`lost`) or not."""
    for lost in (True, False):
        cursor = StreamCursor()
        assert took(cursor, batch(1, 9), batch(2, 12, lost=lost)) == ["next", "again"]
        assert cursor.position == 0
        assert took(cursor, batch(2, 12), batch(2, 13)) == ["next", "next"]


def test_a_run_that_hid_nothing_is_taken_as_it_comes() -> None:
    """A cursor of 0 asks for all that there is."""
    cursor = StreamCursor()
    assert took(cursor, batch(1, 0), batch(2, 3)) == ["next", "restarted"]
    assert cursor.position == 3


def test_what_cannot_be_read_is_passed_by_the_tail() -> None:
    """The server answers a cursor above its records with its newest number."""
    cursor = StreamCursor()
    took(cursor, batch(1, 4))
    cursor.skip()
    assert cursor.position > 1 << 53
    assert took(cursor, batch(1, 7, lost=True), batch(1, 8)) == ["lost", "next"]
    assert cursor.position == 8


def test_the_real_servers_losses_and_restart_are_seen() -> None:
    """Three losses, one of them of our own making, and a restart that asks for the log again."""
    cursor = StreamCursor()
    steps: list[list[Step]] = []
    for line in recorded("lives"):
        if line.note:
            steps.append([])
        elif line.frame and (event := read(line.payload)).enabled:
            steps[-1].append(cursor.take(event))
    assert steps == [
        ["next", "next"],
        ["lost"],  # the log overflowed
        ["lost", "lost", "next"],  # events were dropped
        ["next"],
        ["lost"],  # a cursor above all
        ["next"],
        ["next"],  # a clear
        ["again"],
        ["next"],
        ["next", "next", "next"],
        [],
    ]


@pytest.mark.parametrize("endpoint", ["grpc://127.0.0.1:5555", "127.0.0.1:5555", "grpc://[::1]:5555"])
def test_an_address_is_what_lmcache_prints(endpoint: str) -> None:
    """With or without a scheme."""
    assert target_of(endpoint) == endpoint.removeprefix("grpc://")


@pytest.mark.parametrize("endpoint", ["", "tcp://a:1", "http://a:1", "grpc://a", "grpc://:1", "a:b", "grpc://"])
def test_what_is_no_grpc_address_stops_the_start(endpoint: str) -> None:
    """Above all the server's ZMQ address, which is the default there."""
    with pytest.raises(ConfigError, match="endpoint"):
        target_of(endpoint)
