"""A profile as the match needs it, the same object for all profiles that need the same; pure."""

from functools import lru_cache
from math import lcm
from typing import NamedTuple

from schemas.profiles import TIERS, GroupClass, GroupKind, Profile, Tier, class_bits


class ClassRule(NamedTuple):
    """One group class as the match needs it."""

    kind: GroupKind
    block: int  # tokens
    window: int  # tokens; 1 where the class has none
    tier_bits: tuple[tuple[int, int], ...]  # (bit, position in TIERS), fastest first


class LowerRule(NamedTuple):
    """How vLLM's connectors continue a device hit from a lower tier."""

    chunk: int  # blocks that are loaded together
    last_token: str  # whether a load may cover the prompt's last token, and whether that is counted
    from_start: bool = False  # looked up from the prompt's start, not from where the device ends (LMCache)
    drafting: bool = False  # the last chunk that is found is left out


class Rules(NamedTuple):
    """A profile as the match needs it."""

    unit: int
    alignment: int  # tokens
    classes: tuple[ClassRule, ...]
    drafting: bool  # every class but a state finds one block more than is kept
    drop_ahead: bool  # the dropped block may be the prompt's last
    lower: LowerRule | None  # None: tiers alternate along a run
    gap: int  # blocks in a row without any residency that a hit may still go past
    upper_bound: bool  # the engine does not report all that it needs
    credit: bool  # which counts nevertheless
    pairs: bool  # blocks are of token pairs, of which a prompt has one less than tokens
    least_load: int  # tokens; less than that is not loaded from below the device
    plain: bool  # a single full class, whose blocks are the index's own


ANY_GAP = (1 << 31) - 1
"""More blocks than any prompt has."""


def make_rules(profile: Profile) -> Rules:
    """Return what the match needs of a profile; one object for all profiles that need the same."""
    bits = class_bits(profile.pairs)
    silent = {group.group_class for group in profile.groups} - set(bits)
    drafting = profile.drafting in ("drop_unit", "drop_unit_ahead")
    lower = None
    if profile.tier_walk == "device_then_lower":
        host = profile.tier("host")
        lower = LowerRule(host.chunk, host.last_token, profile.lookup_from_start, drafting and host.drafting)
    # a class of which nothing was ever stored cannot agree to any hit
    classes = () if silent else tuple(_class_rule(c, tiers) for c, tiers in bits.items())
    alignment = profile.alignment or lcm(profile.unit or 1, *(group.block_size for group in profile.groups))
    rules = Rules(
        unit=profile.unit,
        alignment=alignment,
        classes=classes,
        drafting=drafting,
        drop_ahead=profile.drafting == "drop_unit_ahead" and len(bits) > 1,
        lower=lower,
        gap=_gap(profile),
        upper_bound=profile.upper_bound,
        credit=profile.upper_bound_policy == "credit",
        pairs=profile.drafting == "pairs",
        least_load=max((tier.least_tokens for tier in profile.tiers), default=0),
        plain=[(c.kind, c.block) for c in classes] == [("full", profile.unit)]
        and alignment == profile.unit
        and not drafting,
    )
    return _one_of(rules)


@lru_cache(maxsize=4096)
def _one_of(rules: Rules) -> Rules:
    """Return the first of all equal rules."""
    return rules


def _gap(profile: Profile) -> int:
    """Return how far apart marks may lie: a block or chunk longer than the unit is marked at its last unit only."""
    full = [group.block_size for group in profile.groups if group.kind == "full"]
    if not full or not profile.unit:
        return ANY_GAP
    return min(max(full) // profile.unit * max(tier.chunk for tier in profile.tiers) - 1, ANY_GAP)


def _class_rule(group_class: GroupClass, tiers: dict[Tier, int]) -> ClassRule:
    bits = tuple((tiers[tier], position) for position, tier in enumerate(TIERS) if tier in tiers)
    return ClassRule(group_class.kind, group_class.block_size, group_class.window or 1, bits)
