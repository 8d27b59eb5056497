"""Engine events and profiles in few words: blocks of four tokens, names that are letters or small numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from index.hashing import Media, Namespace, chain_hashes, pack_tokens, root_hash
from relays.engine_events import EngineHash, Removed, Stored
from relays.mirror import Mirror
from schemas.profiles import Group, GroupClass, Holder, Pair, Profile, Tier, TierProfile

UNIT = 4
FULL = GroupClass("full", None, UNIT)
HOLDER = Holder("r", 0)


def profile(*groups: Group, unit: int = UNIT, **changes: Any) -> Profile:
    """Return the profile of replica `r` of model `m`; without groups a plain full one of the unit's size."""
    return Profile(
        model="m",
        name="r",
        engine="vllm",
        version="0.32.0",
        dialect="vllm",
        unit=unit,
        alignment=changes.pop("alignment", 0),
        groups=groups or (Group(0, "full", unit or UNIT),),
        **changes,
    )


def tiers(*names: Tier, **changes: Any) -> tuple[TierProfile, ...]:
    """Return plain tiers, the last of them with changes."""
    plain = [TierProfile(name) for name in names]
    return (*plain[:-1], msgspec.structs.replace(plain[-1], **changes))


def pairs(*parts: tuple[GroupClass, Tier]) -> tuple[Pair, ...]:
    """Return residency bits, the first part's lowest."""
    return tuple(Pair(group_class, tier) for group_class, tier in parts)


def tokens(blocks: int, first: int = 1, size: int = UNIT) -> list[int]:
    """Return the token ids of that many blocks, counting up from `first`."""
    return list(range(first, first + blocks * size))


def stored(
    names: Sequence[EngineHash], token_ids: Sequence[int], parent: EngineHash | None = None, **fields: Any
) -> Stored:
    """Return a store of blocks of four tokens (`block_size` says otherwise)."""
    fields.setdefault("block_size", UNIT)
    return Stored(hashes=tuple(names), tokens=token_ids, parent=parent, **fields)


def removed(*names: EngineHash, **fields: Any) -> Removed:
    """Return a removal of one copy of each block."""
    return Removed(hashes=names, **fields)


def chain(
    token_ids: Sequence[int],
    unit: int = UNIT,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    media: Iterable[Media] = (),
    model: str = "m",
) -> list[int]:
    """Return the block hashes that a caller would compute for a prompt."""
    root = root_hash(Namespace(model, unit, adapter=adapter, salt=salt))
    return chain_hashes(root, pack_tokens(token_ids), unit, media=media)


def resident(mirror: Mirror) -> dict[int, int]:
    """Return block_hash -> residency of all that the mirror holds."""
    return dict(mirror.resident())


def drain(mirror: Mirror) -> dict[int, int]:
    """Return block_hash -> residency of all that changed since the last drain."""
    runs = mirror.take_runs(1 << 30)
    return {node.hash: run.residency for run in runs for node in run.nodes}
