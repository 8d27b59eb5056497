"""What a replay found: predictions beside the engine's own counts, and mirrors beside its tables."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec


class Score(msgspec.Struct, kw_only=True):
    """One recording's result; `exact` of `compared` requests met the engine's count to the token."""

    capture: str
    compared: int = 0
    exact: int = 0
    over_tokens: int = 0
    under_tokens: int = 0
    predicted_tokens: int = 0
    delivered_tokens: int = 0
    coverage: float = 1.0  # sum of min(predicted, delivered) / sum of delivered
    over_credit: float = 0.0  # sum of max(predicted - delivered, 0) / sum of predicted
    states: int = 0
    states_equal: int = 0
    host_states: int = 0
    host_states_equal: int = 0
    marked: int = 0  # compared requests whose answer said that it is an upper bound
    excluded: dict[str, int] = {}
    misses: list[str] = []  # the first few requests and steps that were not equal

    def exclude(self, cause: str) -> None:
        """Leave one request (or step) out, by a fact in the log."""
        self.excluded[cause] = self.excluded.get(cause, 0) + 1

    def compare(self, what: str, predicted: int, delivered: int) -> None:
        """Take in one request's prediction and the engine's count, in tokens."""
        self.compare_tiers(what, {"": predicted}, {"": delivered})

    def compare_tiers(self, what: str, predicted: Mapping[str, int], delivered: Mapping[str, int]) -> None:
        """Take in one request's prediction and the engine's counts, each tier apart, in tokens."""
        tiers = predicted.keys() | delivered.keys()
        differences = [predicted.get(tier, 0) - delivered.get(tier, 0) for tier in tiers]
        self.compared += 1
        self.exact += not any(differences)
        self.over_tokens += sum(max(0, difference) for difference in differences)
        self.under_tokens += sum(max(0, -difference) for difference in differences)
        self.predicted_tokens += sum(predicted.values())
        self.delivered_tokens += sum(delivered.values())
        met = self.delivered_tokens - self.under_tokens
        self.coverage = met / self.delivered_tokens if self.delivered_tokens else 1.0
        self.over_credit = self.over_tokens / self.predicted_tokens if self.predicted_tokens else 0.0
        if any(differences):
            self._miss(f"{what}: predicted {_tokens(predicted)}, engine {_tokens(delivered)}")

    def compare_state(self, what: str, equal: bool, *, host: bool = False) -> None:
        """Take in one step's table."""
        if host:
            self.host_states += 1
            self.host_states_equal += equal
        else:
            self.states += 1
            self.states_equal += equal
        if not equal:
            self._miss(f"{what}: {'host ' if host else ''}table differs")

    def _miss(self, text: str) -> None:
        if len(self.misses) < 20:
            self.misses.append(text)


def _tokens(by_tier: Mapping[str, int]) -> str:
    return ", ".join(f"{tokens} {tier}".strip() for tier, tokens in by_tier.items())


def total(scores: Iterable[Score], name: str = "total") -> Score:
    """Return the scores' sum, as one row."""
    summed = Score(capture=name)
    excluded: Counter[str] = Counter()
    for score in scores:
        for name in ("compared", "exact", "over_tokens", "under_tokens", "predicted_tokens", "delivered_tokens"):
            setattr(summed, name, getattr(summed, name) + getattr(score, name))
        for name in ("states", "states_equal", "host_states", "host_states_equal", "marked"):
            setattr(summed, name, getattr(summed, name) + getattr(score, name))
        excluded.update(score.excluded)
        summed.misses += score.misses
    summed.excluded = dict(excluded)
    if summed.delivered_tokens:
        summed.coverage = 1 - summed.under_tokens / summed.delivered_tokens
    if summed.predicted_tokens:
        summed.over_credit = summed.over_tokens / summed.predicted_tokens
    return summed
