"""The hit rule by trying every length, written from DESIGN 4.7 and vLLM's managers, without index/match.py.

Sizes are small, so nothing is clever: a block is there or not, a length is allowed or not, the longest one wins.
Source: vLLM 0.32 v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py (find_longest_cache_hit),
distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py (_lookup_complete_chunks).
"""

from collections.abc import Callable, Sequence
from math import lcm

from schemas.profiles import TIERS, GroupClass, Profile, Tier, class_bits

Has = Callable[[GroupClass, int], bool]  # (class, number of the block) -> is it there


class Holding:
    """Which blocks of a prompt one holder has, class by class and tier by tier."""

    def __init__(self, profile: Profile, residencies: Sequence[int]) -> None:
        self.profile = profile
        self.residencies = residencies
        self.bits = class_bits(profile.pairs)
        self.alignment = profile.alignment or lcm(profile.unit, *(c.block_size for c in self.bits))

    def mark(self, token: int) -> int:
        """Return the residency of the unit that ends at a token."""
        unit = token // self.profile.unit - 1
        return self.residencies[unit] if 0 <= unit < len(self.residencies) else 0

    def tiers_of(self, group_class: GroupClass, block: int) -> list[Tier]:
        """Return the tiers of a whole block, fastest first."""
        residency = self.mark((block + 1) * group_class.block_size)
        return [tier for tier in TIERS if residency & self.bits[group_class].get(tier, 0)]

    def within(self, *tiers: Tier) -> Has:
        """Return the predicate that looks at some tiers only."""
        return lambda group_class, block: any(tier in tiers for tier in self.tiers_of(group_class, block))


def covered(has: Has, group_class: GroupClass, first: int, last: int) -> bool:
    """Return whether every block that holds one of the tokens [first, last) is there."""
    size = group_class.block_size
    return all(has(group_class, token // size) for token in range(max(0, first), last))


def agrees(has: Has, group_class: GroupClass, length: int, floor: int = 0, ahead: int = 0) -> bool:
    """Return whether a class allows a hit of a length, what lies below `floor` being there already.

    `ahead`: tokens behind the hit that must be there too, because drafting takes them from it.
    """
    if group_class.kind == "state":
        return has(group_class, length // group_class.block_size - 1)
    first = floor if group_class.kind == "full" else max(floor, length - (group_class.window or 1) + 1)
    return covered(has, group_class, first, length + ahead)


def longest(holding: Holding, has: Has, limit: int, floor: int = 0) -> int:
    """Return the longest aligned length in (floor, limit] that all classes allow, or `floor`."""
    step = holding.alignment
    for length in range(limit // step * step, floor, -step):
        if all(agrees(has, c, length, floor) for c in holding.bits):
            return length
    return floor


def drafted(holding: Holding, prompt_tokens: int) -> int:
    """Return the longest hit behind which each class but a state has one block more, which drafting takes.

    That block lies below the last token, except with several groups from 0.32 on (`drop_unit_ahead`).
    """
    ahead = holding.profile.drafting == "drop_unit_ahead" and len(holding.bits) > 1
    limit = prompt_tokens if ahead else prompt_tokens - 1
    has = holding.within(*TIERS)
    for length in range((prompt_tokens - 1) // holding.alignment * holding.alignment, 0, -holding.alignment):
        if all(
            agrees(has, c, length, ahead=c.block_size) and (c.kind == "state" or length + c.block_size <= limit)
            for c in holding.bits
        ):
            return length
    return 0


def hit(profile: Profile, residencies: Sequence[int], prompt_tokens: int) -> int:
    """Return how many tokens of the prompt the engine reuses."""
    holding = Holding(profile, residencies)
    limit = prompt_tokens - 1
    if profile.drafting != "none":
        return drafted(holding, prompt_tokens)
    if profile.tier_walk == "mixed":
        return longest(holding, holding.within(*TIERS), limit)
    device = longest(holding, holding.within("gpu"), limit)
    lower = holding.within("host", "disk", "pool", "other")
    if profile.tier("host").last_token == "never":
        return longest(holding, lower, limit, floor=device)
    reach = chunked(holding, lower, device, prompt_tokens)
    if profile.tier("host").last_token == "uncounted":
        reach = max(device, min(reach, prompt_tokens - 1))
    return reach


def chunked(holding: Holding, lower: Has, device: int, prompt_tokens: int) -> int:
    """Return where OffloadingConnector's load ends; all classes have blocks of one size."""
    (size,) = {c.block_size for c in holding.bits}
    per_chunk = holding.profile.tier("host").chunk
    chunk = size * per_chunk
    kinds = {c.kind for c in holding.bits}
    most = prompt_tokens - (kinds != {"full"})
    if "state" in kinds:
        most -= most % chunk

    def has(group_class: GroupClass, number: int) -> bool:
        return lower(group_class, (number + 1) * per_chunk - 1)

    first = device // chunk
    for last in range(prompt_tokens // chunk, first, -1):
        reach = min(most, last * chunk)
        if (
            -(-reach // chunk) == last
            and reach - device >= chunk
            and all(_loads(has, c, first, last, chunk) for c in holding.bits)
        ):
            return reach
    return device


def _loads(has: Has, group_class: GroupClass, first: int, last: int, chunk: int) -> bool:
    """Return whether the chunks [first, last) can be loaded: all, a window's last ones, or a state's last one."""
    need = {"full": last, "state": 1, "window": -(-(group_class.window or 1) // chunk)}[group_class.kind]
    return all(has(group_class, number) for number in range(max(first, last - need), last))


def by_tier(profile: Profile, residencies: Sequence[int], length: int) -> dict[Tier, int]:
    """Return a mixed hit's tokens by tier: each unit's slowest of the classes that are needed there."""
    holding = Holding(profile, residencies)
    split: dict[Tier, int] = {}
    for start in range(0, length, profile.unit):
        slowest = 0
        for group_class in holding.bits:
            size = group_class.block_size
            back = {"full": length, "state": size, "window": (group_class.window or 1) - 1}[group_class.kind]
            if start + profile.unit > length - back:
                slowest = max(slowest, TIERS.index(holding.tiers_of(group_class, start // size)[0]))
        split[TIERS[slowest]] = split.get(TIERS[slowest], 0) + profile.unit
    return split


def fine_hit(profile: Profile, residencies: Sequence[int], prompt_tokens: int) -> int:
    """Return the hit where partial blocks count: one full and one state class (vLLM's fine mode).

    A full class finds whole blocks and then the last partial entry in the block after them; whatever ends before that
    is covered. A state class has an entry exactly where the hit ends. Drafting takes one unit of what is full.
    """
    holding = Holding(profile, residencies)
    (full,) = [c for c in holding.bits if c.kind == "full"]
    (state,) = [c for c in holding.bits if c.kind == "state"]
    unit, drop = profile.unit, 0 if profile.drafting == "none" else profile.unit
    limit = min(prompt_tokens - 1 + drop, prompt_tokens // unit * unit)
    whole = 0
    while whole + full.block_size <= limit and holding.tiers_of(full, whole // full.block_size):
        whole += full.block_size
    inside = range(whole + unit, min(limit, whole + full.block_size - 1) + 1, unit)
    found = max((end for end in inside if holding.mark(end) & _mask(holding, full)), default=whole)
    found = max(0, found - drop)
    ends = range(unit, found + 1, unit)
    return max((end for end in ends if holding.mark(end) & _mask(holding, state)), default=0)


def _mask(holding: Holding, group_class: GroupClass) -> int:
    return sum(holding.bits[group_class].values())
