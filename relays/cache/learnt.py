"""A holder's profile as its events complete it: unit, groups, tiers and windows that nobody configured; pure."""

from collections import Counter
from collections.abc import Iterable
from math import gcd

import msgspec

from relays.engine_events import EngineEvent, Stored
from schemas.profiles import MAX_PAIRS, TIERS, Group, GroupClass, Pair, Profile, Tier

_TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}

Place = int
"""A group's position in the profile and a tier, as one number."""


def place_of(position: int, tier: Tier) -> Place:
    """Return the number of a group's copies in a tier."""
    return position * len(TIERS) + _TIER_NUMBER[tier]


def tier_of(place: Place) -> Tier:
    """Return the tier of a place."""
    return TIERS[place % len(TIERS)]


class LearntProfile:
    """The profile of one mirror; it only ever grows, but for a unit that turns out smaller."""

    def __init__(self, profile: Profile, counts: Counter[str]) -> None:
        self._counts = counts
        self._learns_unit = not profile.unit
        self._change(profile)

    def position(self, group: int) -> int | None:
        """Return where a group stands in the profile; None: no event has shown it yet."""
        return self._positions.get(group)

    def group_of(self, place: Place) -> int:
        """Return the engine's number of a place's group."""
        return self.profile.groups[place // len(TIERS)].index

    def unit(self, events: Iterable[EngineEvent]) -> bool:
        """Take the unit from block sizes; return whether a smaller one voids what was hashed in larger ones."""
        if not self._learns_unit:
            return False
        before = unit = self.profile.unit
        for event in events:
            if isinstance(event, Stored) and event.tokens:
                unit = gcd(unit, event.block_size)
        if unit != before:
            self._change(self.profile, unit=unit)
        return 0 < unit < before

    def group(self, event: Stored) -> int | None:
        """Return the position of the event's group, taking it in where it is seen first here."""
        position = self._positions.get(event.group)
        if position is None:
            if not event.block_size:
                self._counts["group_unknown"] += len(event.hashes)
                return None
            group = event.group_spec or Group(event.group, "full", event.block_size)
            if self.profile.unit and group.block_size % self.profile.unit:
                self._counts["block_size_off_unit"] += 1
                return None
            position = len(self.profile.groups)
            self._change(self.profile, groups=(*self.profile.groups, group))
        return position

    def pair(self, position: int, tier: Tier) -> bool:
        """Return whether a group's copies in a tier have a bit, giving them one where there is room."""
        pair = Pair(self.profile.groups[position].group_class, tier)
        if pair not in self.profile.pairs:
            if len(self.profile.pairs) == MAX_PAIRS:
                self._counts["pairs_exhausted"] += 1
                return False
            self._change(self.profile, pairs=(*self.profile.pairs, pair))
        return True

    def token_pairs(self) -> None:
        """Take in that the engine drafts on pairs of tokens: the shape of its tokens alone shows it (DESIGN 4.8)."""
        if self.profile.drafting != "pairs":
            self._change(self.profile, drafting="pairs")

    def upper_bound(self) -> None:
        """Take in that the engine has a group which no rule here fits."""
        if not self.profile.upper_bound:
            self._change(self.profile, upper_bound=True)

    def windows(self, sizes: tuple[int, ...]) -> None:
        """Take in the attention windows that announce blocks; where there are several, one alone is an upper bound."""
        if sizes != self.profile.window_sizes:
            self._change(self.profile, window_sizes=sizes, upper_bound=len(sizes) > 1)

    def _change(self, profile: Profile, **changes: object) -> None:
        self.profile = msgspec.structs.replace(profile, **changes)
        self._positions = {group.index: position for position, group in enumerate(self.profile.groups)}
        members: dict[GroupClass, list[int]] = {}
        for position, group in enumerate(self.profile.groups):
            members.setdefault(group.group_class, []).append(position)
        # for each bit of the residency, the places that must all have a copy
        self.bits = [
            (1 << number, [place_of(position, pair.tier) for position in members[pair.group_class]])
            for number, pair in enumerate(self.profile.pairs)
            if pair.group_class in members
        ]
