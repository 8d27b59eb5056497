"""How near predictions come to what engines then reuse; ratios of sums, each with its own denominator (DESIGN 9)."""

import msgspec


class Agreement(msgspec.Struct):
    """Sums over finished requests, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    delivered_tokens: int = 0
    covered_tokens: int = 0  # min(predicted, delivered)
    exact: int = 0  # requests
    unknown: int = 0  # requests priced while the chosen replica's state was unknown

    def add(self, prompt_tokens: int, predicted_tokens: int, delivered_tokens: int) -> None:
        """Take in one finished request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += predicted_tokens
        self.delivered_tokens += delivered_tokens
        self.covered_tokens += min(predicted_tokens, delivered_tokens)
        self.exact += predicted_tokens == delivered_tokens

    @property
    def reuse(self) -> float:
        """Share of all prompt tokens that engines reused."""
        return self.delivered_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def coverage(self) -> float:
        """Share of the reused tokens that had been predicted."""
        return self.covered_tokens / self.delivered_tokens if self.delivered_tokens else 1.0

    @property
    def over_credit(self) -> float:
        """Share of the predicted tokens that engines did not have."""
        over = self.predicted_tokens - self.covered_tokens
        return over / self.predicted_tokens if self.predicted_tokens else 0.0
