"""The messages with which a relay is measured."""

from ops.bench.relay import feed, payloads


def test_all_that_is_measured_is_placed() -> None:
    """Nothing is refused or waits, and no more is held than was asked for."""
    rank = feed(list(payloads(2000, 500)))
    assert 400 < rank.mirror.blocks <= 500
    assert sum(1 for _ in rank.mirror.resident()) == rank.mirror.blocks
    assert not any(rank.counts.values())
    assert not any(rank.mirror.counts.values())
