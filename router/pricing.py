"""Prices of the candidates and the choice among them; pure.

So far the price of a replica is the number of tokens that it would have to compute; load, transfer and queue enter
with their figures in the profile.
"""

import random
from collections.abc import Iterable, Sequence

from index.liveness import BELIEVED, Judgement
from index.match import NOTHING, Reach
from router.api import NO_TOKENS, ReplicaPrice
from schemas.profiles import Holder


def price(holder: Holder, judgement: Judgement, reach: Reach | None, prompt_tokens: int) -> ReplicaPrice:
    """Return one holder's answer.

    Args:
        reach: what its engine would reuse; None where the prompt cannot be matched in this holder's blocks.
    """
    reasons = list(judgement.reasons)
    state: str = judgement.state
    if reach is None:
        state, reasons = "unknown", [*reasons, "block_size"]
    credited = NOTHING if reach is None or judgement.state not in BELIEVED else reach
    return ReplicaPrice(
        replica=holder.name,
        rank=holder.rank,
        state=state,
        cached_tokens=NO_TOKENS | credited.by_tier,
        pools={name: {str(tier): tokens for tier, tokens in tiers.items()} for name, tiers in credited.pools.items()},
        reusable_tokens=credited.tokens,
        upper_bound=credited.upper_bound,
        uncached_tokens=prompt_tokens - credited.tokens,
        reasons=[*reasons, *credited.marks],
    )


def unknown(name: str, rank: int | None, prompt_tokens: int, reason: str) -> ReplicaPrice:
    """Return the answer for a replica of which nothing can be said."""
    return price(Holder(name, rank), Judgement("unknown", (reason,)), NOTHING, prompt_tokens)


def merge_ranks(prices: Sequence[ReplicaPrice]) -> ReplicaPrice:
    """Return one answer for a replica whose rank the gateway cannot pick: the least, with the most beside it."""
    least = min(prices, key=lambda p: p.reusable_tokens)
    least.reusable_tokens_max = max(p.reusable_tokens for p in prices)
    least.rank = None
    return least


def choose(prices: Iterable[ReplicaPrice], rng: random.Random) -> str | None:
    """Return the cheapest replica as `replica/rank`, ties at random; None where nothing is known of any."""
    known = [p for p in prices if p.state in BELIEVED]
    if not known:
        return None
    least = min(p.uncached_tokens for p in known)
    best = rng.choice([p for p in known if p.uncached_tokens == least])
    return best.replica if best.rank is None else f"{best.replica}/{best.rank}"
