"""Sources without a ring: what their counters, connections and silences mean."""

import pytest

from relays.lossy import Belief, Origin, Seen

MAX_AGE_S, UNKNOWN_AFTER_S = 100.0, 30.0


def connected(at_s: float = 0.0) -> Origin:
    """Return a publisher that is heard for the first time."""
    origin = Origin("0")
    origin.lost_s = at_s
    origin.connection(connected=True, known=False, now_s=at_s)
    return origin


def belief(*origins: Origin, max_age_s: float | None = MAX_AGE_S) -> Belief:
    return Belief(origins, max_age_s=max_age_s, unknown_after_s=UNKNOWN_AFTER_S)


def beat(of: Belief, now_s: float) -> tuple[str, str, float | None]:
    """Return state, reason and age limit, as a heartbeat asks for them."""
    limit_s = of.age_limit_s(now_s)
    return (*of.state(now_s, heard=True), limit_s)


def test_a_counter_says_what_was_missed() -> None:
    """Late is no gap; Mooncake's counter skips one for each event that it dropped."""
    origin = Origin("0")
    said = [origin.take(number) for number in (5, 6, 9, 10, 3, 4)]
    assert said == [
        Seen("next", 4),
        Seen("next"),
        Seen("gap", 2),
        Seen("next"),
        Seen("new_life"),
        Seen("next"),
    ]
    assert Origin("1").take(0) == Origin("2").take(1) == Seen("next")


def test_a_repeated_number_is_another_run() -> None:
    """A publisher without a ring says nothing twice."""
    origin = Origin("0")
    origin.take(7)
    assert origin.take(7).verdict == "new_life"


@pytest.mark.parametrize(("first", "seen"), [(8, Seen("next")), (9, Seen("gap", 1)), (2, Seen("new_life"))])
def test_a_relay_goes_on_behind_what_an_earlier_run_took(first: int, seen: Seen) -> None:
    """What came between the runs shows as a gap."""
    origin = Origin("0")
    origin.resume(7)
    assert origin.take(first) == seen


def test_what_this_run_has_heard_is_not_resumed_over() -> None:
    """The earlier run's last number comes late: the publisher has said more since."""
    origin = Origin("0")
    origin.take(20)
    origin.resume(7)
    assert origin.take(21) == Seen("next")


def test_a_doubt_ends_when_all_that_was_known_is_gone() -> None:
    """Stale for half the age, at half the age; then what came before the doubt is too old, and nothing since.

    The heartbeat at which that is forgotten does not say live yet: the index has not heard of it.
    """
    origin = connected()
    one = belief(origin)
    assert beat(one, 10.0) == ("live", "", MAX_AGE_S)
    origin.doubt(20.0)
    assert beat(one, 21.0) == ("stale", "events_lost", 50.0)
    assert beat(one, 69.0) == ("stale", "events_lost", 50.0)
    assert beat(one, 73.0) == ("stale", "events_lost", 53.0)
    assert beat(one, 74.0) == ("live", "", 54.0)
    assert beat(one, 500.0) == ("live", "", MAX_AGE_S)


def test_nothing_is_doubted_where_nothing_is_known() -> None:
    """A gap before the first store costs nothing."""
    origin = connected()
    origin.doubt(5.0, known=False)
    assert beat(belief(origin), 6.0) == ("live", "", MAX_AGE_S)


def test_a_lost_connection_is_doubted_from_its_end_on() -> None:
    """Stale, then unknown; back, all that was known until then may have ended unheard."""
    origin = connected()
    one = belief(origin)
    origin.connection(connected=False, known=True, now_s=10.0)
    assert beat(one, 39.0) == ("stale", "disconnected", 50.0)
    assert beat(one, 41.0) == ("unknown", "disconnected", 50.0)
    origin.connection(connected=True, known=True, now_s=60.0)
    assert beat(one, 109.0) == ("stale", "events_lost", 50.0)
    assert beat(one, 111.0) == ("stale", "events_lost", 51.0)
    assert beat(one, 112.0)[0] == "live"


def test_one_of_several_publishers_is_away() -> None:
    """As long as another is heard, the pool is not unknown, however long that takes."""
    origins = [connected(), connected()]
    one = belief(*origins)
    origins[1].connection(connected=False, known=True, now_s=10.0)
    assert beat(one, 500.0) == ("stale", "disconnected", 50.0)
    origins[0].connection(connected=False, known=True, now_s=510.0)
    assert beat(one, 530.0)[0] == "stale"
    assert beat(one, 541.0)[0] == "unknown"


def test_the_latest_of_several_doubts_counts() -> None:
    """Whichever publisher it is of."""
    origins = [connected(), connected()]
    one = belief(*origins)
    origins[0].doubt(10.0)
    origins[1].doubt(40.0)
    assert beat(one, 85.0) == ("stale", "events_lost", 50.0)
    assert beat(one, 95.0) == ("stale", "events_lost", 55.0)
    assert beat(one, 96.0)[0] == "live"


def test_a_new_life_has_no_doubts() -> None:
    """Nothing that is known comes from before."""
    origin = connected()
    origin.doubt(5.0)
    origin.trust()
    assert beat(belief(origin), 6.0) == ("live", "", MAX_AGE_S)


def test_copies_that_do_not_age_are_never_doubted() -> None:
    """LMCache's server says what it cannot send again."""
    origin = connected()
    one = belief(origin, max_age_s=None)
    origin.connection(connected=False, known=False, now_s=10.0)
    assert beat(one, 11.0) == ("stale", "disconnected", None)
    origin.connection(connected=True, known=False, now_s=12.0)
    assert beat(one, 13.0) == ("live", "", None)


def test_nothing_heard_yet() -> None:
    """Connected, and silent."""
    one = belief(connected())
    one.age_limit_s(1.0)
    assert one.state(1.0, heard=False) == ("silent", "no event seen yet")
