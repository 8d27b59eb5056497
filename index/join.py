"""A replica's own blocks and those of the pools that it reads, joined into one reach, in tokens; pure.

Units may differ (blocks of 16 beside chunks of 256): a reach goes on at a position where any source has the whole
retrieval unit that covers it. Pools count for models with one full-attention class; a window's or a state's blocks in
a pool are not told apart by its events, and earn nothing.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from index.match import Reach, Rules, Run, reusable_tokens
from schemas.profiles import TIERS, Tier


class PoolRuns(NamedTuple):
    """One pool's part of a prompt's chain, in the pool's own unit."""

    name: str
    runs: Sequence[Run]
    rules: Rules
    chunk: int  # retrieval unit, in blocks of the pool's unit
    tiers: frozenset[Tier]  # that the replica can read
    from_start: bool = False  # it is looked up from the prompt's start, not from where the device ends
    last_token: bool = False  # a load may cover the prompt's last token, which is then computed again


class _Source(NamedTuple):
    """Where tokens can be had in one place, fastest place first."""

    speed: tuple[int, int]  # own tiers before pools, then by tier
    pool: str | None
    tier: Tier
    starts: list[int]  # tokens
    ends: list[int]
    last_token: bool = False

    def end_from(self, position: int) -> int:
        """Return where the interval that covers `position` ends, or `position`."""
        number = bisect_right(self.starts, position) - 1
        return max(position, self.ends[number]) if number >= 0 else position


def joined_tokens(
    own: Sequence[Run], rules: Rules, pools: Iterable[PoolRuns], prompt_tokens: int, *, whole_prompt: bool = False
) -> Reach:
    """Return the longest prefix that a replica would reuse from its own tiers and its pools.

    A reach alternates between sources where the profile's tiers are mixed; behind vLLM's connectors it is the device's
    hit, continued by lower tiers and pools. The tokens split by the fastest source at each position.
    """
    alone = reusable_tokens(own, rules, prompt_tokens, whole_prompt=whole_prompt)
    listed = [pool for pool in pools if pool.runs]
    plain = len(rules.classes) <= 1 and all(group.kind == "full" for group in rules.classes)
    if not listed or not plain or not rules.unit or (rules.upper_bound and not rules.credit):
        return alone
    device = alone.by_tier.get("gpu", 0) if rules.lower is not None else 0
    own_sources = _own_sources(own, rules, lower_only=rules.lower is not None)
    sources = sorted([*own_sources, *(source for pool in listed for source in _pool_sources(pool))])
    limit = prompt_tokens if whole_prompt else prompt_tokens - 1
    reach = device
    while (further := max((source.end_from(reach) for source in sources), default=reach)) > reach:
        reach = further
    if reach > limit and not any(source.last_token and source.end_from(limit) > limit for source in sources):
        limit = limit // rules.unit * rules.unit
    reach = max(device, min(reach, limit))
    if reach <= alone.tokens:
        return alone
    return _split(sources, device, reach, rules.upper_bound)


def _own_sources(runs: Sequence[Run], rules: Rules, *, lower_only: bool) -> list[_Source]:
    sources: list[_Source] = []
    for group in rules.classes:
        for bit, position in group.tier_bits:
            if lower_only and position == 0:
                continue
            chunk = rules.lower.chunk if rules.lower is not None and position else 1
            starts, ends = _intervals(runs, bit, rules.unit, group.block * chunk)
            sources.append(_Source((0, position), None, TIERS[position], starts, ends))
    return sources


def _pool_sources(pool: PoolRuns) -> list[_Source]:
    sources: list[_Source] = []
    for group in pool.rules.classes:
        for bit, position in group.tier_bits:
            if TIERS[position] in pool.tiers:
                starts, ends = _intervals(pool.runs, bit, pool.rules.unit, group.block * pool.chunk)
                if pool.from_start:
                    starts, ends = (starts[:1], ends[:1]) if starts[:1] == [0] else ([], [])
                sources.append(_Source((1, position), pool.name, TIERS[position], starts, ends, pool.last_token))
    return sources


def _intervals(runs: Sequence[Run], bit: int, unit: int, block: int) -> tuple[list[int], list[int]]:
    """Return the tokens that whole blocks cover; a block is marked at its last unit."""
    starts: list[int] = []
    ends: list[int] = []
    per_block = block // unit
    for run in runs:
        if not run.residency & bit:
            continue
        first, last = run.start // per_block * block, (run.start + run.length) // per_block * block
        if last > first and ends and ends[-1] == first:
            ends[-1] = last
        elif last > first:
            starts.append(first)
            ends.append(last)
    return starts, ends


def _split(sources: Sequence[_Source], device: int, reach: int, upper_bound: bool) -> Reach:
    """Return the reach with each position under its fastest source; `sources` are in that order."""
    edges = {device, reach}
    for source in sources:
        edges.update(edge for edge in (*source.starts, *source.ends) if device < edge < reach)
    ordered = sorted(edges)
    by_tier: dict[Tier, int] = {"gpu": device} if device else {}
    pools: dict[str, dict[Tier, int]] = {}
    for start, end in pairwise(ordered):
        source = next(source for source in sources if source.end_from(start) > start)
        tokens = end - start
        if source.pool is None:
            by_tier[source.tier] = by_tier.get(source.tier, 0) + tokens
        else:
            by_tier["pool"] = by_tier.get("pool", 0) + tokens
            tiers = pools.setdefault(source.pool, {})
            tiers[source.tier] = tiers.get(source.tier, 0) + tokens
    return Reach(reach, by_tier, upper_bound, pools)
