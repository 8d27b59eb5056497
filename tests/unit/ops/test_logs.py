"""Logs: what repeats itself without end is written now and then."""

import json
import logging
from io import StringIO

import structlog

from ops.logs import Sparing, configure


class Clock:
    """Tells the time that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_of_lines_that_are_repeated_a_few_pass_in_ten_seconds() -> None:
    """Lines of one kind are left out for a while and counted; other kinds pass."""
    clock = Clock()
    sparing = Sparing(clock)
    passed: dict[str, list[tuple[float, int]]] = {"a": [], "b": []}
    for step in range(200):
        clock.now_s = 100.0 + step / 10
        for kind, times in passed.items():
            left_out = sparing.left_out(kind)
            if left_out is not None:
                times.append((step / 10, left_out))
    first = [(0.0, 0), (0.1, 0), (0.2, 0), (0.3, 0), (0.4, 0)]
    assert passed["a"] == [*first, (10.0, 95), (10.1, 0), (10.2, 0), (10.3, 0), (10.4, 0)]
    assert passed["a"] == passed["b"]


def test_what_differs_from_line_to_line_is_not_remembered_without_end() -> None:
    """A library that puts values into its text passes, and costs a bounded memory."""
    sparing = Sparing(Clock())
    assert all(sparing.left_out(f"line {number}") == 0 for number in range(2500))
    assert len(sparing._seen) <= 1000


def test_libraries_and_our_own_warnings_are_spared_and_news_is_not() -> None:
    """Of a hundred warnings about one holder five are written, whatever they name; of another holder five too."""
    written = StringIO()
    before = logging.getLogger().handlers[:], logging.getLogger().level, structlog.get_config()
    try:
        configure("info", "json", written)
        for number in range(100):
            logging.getLogger("library").error("node %s is away", number)
            for holder in ("r/0", "r/1"):
                structlog.get_logger().warning("relay.message_refused", holder=holder, detail=number)
            structlog.get_logger().info("relay.connected", holder="r/0")
    finally:
        logging.getLogger().handlers[:], level, config = before
        logging.getLogger().setLevel(level)
        structlog.configure(**config)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert sum(line["event"] == "relay.connected" for line in lines) == 100
    assert [line["event"] for line in lines if line.get("logger") == "library"] == [
        f"node {number} is away" for number in range(5)
    ]
    for holder in ("r/0", "r/1"):
        refused = [line for line in lines if line["event"] == "relay.message_refused" and line["holder"] == holder]
        assert [line["detail"] for line in refused] == list(range(5))


def test_a_librarys_line_says_how_many_were_left_out() -> None:
    """With its values in place."""
    clock = Clock()
    sparing = Sparing(clock)
    lines = [logging.LogRecord("library", logging.ERROR, "", 0, "node %s is away", (n,), None) for n in range(7)]
    assert [sparing.filter(line) for line in lines[:6]] == [True] * 5 + [False]
    clock.now_s += 10.0
    assert sparing.filter(lines[6])
    assert lines[6].getMessage() == "node 6 is away (and 1 like this)"
