"""A replica's own blocks, continued from one of the pools that it reads, in tokens; pure.

An engine asks for what its own tiers lack at one place: vLLM's MultiConnector loads from the first connector that has
more than the device, and from no other. So a replica's own lower tiers come first, then its pools in the order in which
its profile names them, and the first that has more gives all that is loaded. Units may differ (blocks of 16 beside
chunks of 256). Pools count for models with one full-attention class; a window's or a state's blocks in a pool are not
told apart by its events, and earn nothing.

Source: vLLM distributed/kv_transfer/kv_connector/v1/multi_connector.py (get_num_new_matched_tokens).
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from index.match import Reach, Run
from index.rules import Rules
from schemas.profiles import TIERS, Profile, Tier, join_mismatch

_LAST_TOKENS = ("never", "uncounted", "counted")  # least first


class PoolPart:
    """One pool's part of a prompt's chain, as far as its reader can read its tiers; the same for all such readers."""

    def __init__(self, pool: Profile, rules: Rules, runs: Sequence[Run], tiers: Iterable[Tier]) -> None:
        """Prepare what readers ask.

        Args:
            rules: of the pool.
            runs: its blocks along the chain, in its own unit.
            tiers: of the pool, that the reader can read.

        Cost: O(runs).
        """
        self.name = pool.name
        self._from_start = pool.lookup_from_start
        self._last_token = max((tier.last_token for tier in pool.tiers), key=_LAST_TOKENS.index)
        self._unit = rules.unit
        # a name stands for a whole retrieval unit, whose last block it marks (DESIGN 4.12)
        chunk = max(tier.chunk for tier in pool.tiers)
        self._chunk_tokens = chunk * rules.unit
        self._starts: list[int] = []  # tokens; whole chunks in one tier
        self._ends: list[int] = []
        self._tiers: list[Tier] = []
        self._reaches: list[int] = []  # where the unbroken stretch that a part belongs to ends
        readable = frozenset(tiers)
        bits = [
            (bit, TIERS[place]) for rule in rules.classes for bit, place in rule.tier_bits if TIERS[place] in readable
        ]
        for run in runs:
            tier = next((tier for bit, tier in bits if run.residency & bit), None)
            first, last = run.start // chunk, (run.start + run.length) // chunk
            if tier is not None and last > first:
                self._add(first * self._chunk_tokens, last * self._chunk_tokens, tier)
        self._find_reaches()

    def reach(self, own_tokens: int, prompt_tokens: int, *, whole_prompt: bool = False) -> int:
        """Return where a prompt's prefix ends that a replica has with this pool: `own_tokens` where that adds nothing.

        Args:
            own_tokens: what its own tiers have.
            whole_prompt: the last token need not be computed.

        Cost: O(log runs).
        """
        end = self._end_from(0 if self._from_start else own_tokens)
        if whole_prompt or self._last_token == "counted":
            end = min(end, prompt_tokens)
        elif self._last_token == "uncounted":
            end = min(end, prompt_tokens - 1)
        else:
            end = min(end, (prompt_tokens - 1) // self._unit * self._unit)
        least = 1 if self._from_start else self._chunk_tokens  # OffloadingConnector loads no less than a chunk
        return end if end - own_tokens >= least else own_tokens

    def split(self, first: int, last: int) -> dict[Tier, int]:
        """Return the tokens of [first, last), all of which this pool has, by its tiers."""
        by_tier: dict[Tier, int] = {}
        for number in range(bisect_right(self._starts, first) - 1, len(self._starts)):
            start, end = max(first, self._starts[number]), min(last, self._ends[number])
            if end <= start:
                break
            tier = self._tiers[number]
            by_tier[tier] = by_tier.get(tier, 0) + end - start
        return by_tier

    def _add(self, start: int, end: int, tier: Tier) -> None:
        if self._ends and self._ends[-1] == start and self._tiers[-1] == tier:
            self._ends[-1] = end
            return
        self._starts.append(start)
        self._ends.append(end)
        self._tiers.append(tier)

    def _find_reaches(self) -> None:
        self._reaches = list(self._ends)
        for number in range(len(self._ends) - 2, -1, -1):
            if self._ends[number] == self._starts[number + 1]:
                self._reaches[number] = self._reaches[number + 1]

    def _end_from(self, position: int) -> int:
        """Return where the unbroken stretch that covers a position ends, or the position."""
        number = bisect_right(self._starts, position) - 1
        covered = number >= 0 and self._ends[number] > position
        return self._reaches[number] if covered else position


def unread_reason(pool: Profile, replica: Profile) -> str:
    """Return why nothing that a pool has counts for a replica that reads it, or an empty text."""
    if not replica.unit:
        return "block_size_unknown"
    classes = {group.group_class for group in replica.groups} or {pair.group_class for pair in replica.pairs}
    if len(classes) > 1 or any(known.kind != "full" for known in classes):
        return "groups_not_told"
    return join_mismatch(pool, replica)


def with_pools(
    own: Reach, rules: Rules, pools: Iterable[PoolPart], prompt_tokens: int, *, whole_prompt: bool = False
) -> Reach:
    """Return what a replica would reuse from its own tiers and its pools.

    Args:
        own: what it would reuse without pools.
        rules: of its profile.
        pools: that it reads, in the order in which it asks them.
    """
    if rules.upper_bound and not rules.credit:
        return own
    if rules.lower is not None and own.tokens > own.by_tier.get("gpu", 0):
        return own  # its own connector has more than the device, and is the one that loads
    for pool in pools:
        reach = pool.reach(own.tokens, prompt_tokens, whole_prompt=whole_prompt)
        if reach > own.tokens:
            by_tier: dict[Tier, int] = {**own.by_tier, "pool": reach - own.tokens}
            return Reach(reach, by_tier, own.upper_bound, {pool.name: pool.split(own.tokens, reach)})
    return own
