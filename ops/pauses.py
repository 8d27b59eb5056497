"""Pauses between attempts at what is away for a while."""


class Pauses:
    """Each is twice as long as the one before, from a first to a longest."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """Return how long to wait now."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first again: an attempt succeeded."""
        self._next_s = self._first_s
