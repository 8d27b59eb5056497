"""What versions of vLLM do differently, as far as a model with one full-attention group shows it; pure."""

import msgspec

from relays.dialects import parse_version
from schemas.errors import ConfigError

OLDEST = (0, 11)

_STORED_FIELDS = {(0, 11): 6, (0, 14): 7, (0, 18): 8, (0, 20): 9, (0, 22): 11, (0, 26): 12, (0, 30): 14}
_REMOVED_FIELDS = {(0, 11): 2, (0, 20): 3, (0, 26): 4, (0, 30): 5}


class Dialect(msgspec.Struct, frozen=True):
    """One version's ways.

    Source: distributed/kv_events.py, v1/core/block_pool.py, v1/core/kv_cache_utils.py, v1/core/kv_cache_manager.py of
    0.12.0, 0.14.1, 0.22.1, 0.25.1, 0.28.0 and 0.32.0; for the versions between, engines/vllm-events.md 1.3 and 5.
    """

    event_maps: bool  # events are maps (0.24), before that arrays
    stored_fields: int  # of schemas.vllm.BlockStored that this version has, in wire order
    stored_required: int  # of these, sent even where they are None
    removed_fields: int
    replay_topic: bool  # a replay's messages name the topic (0.26)
    tagged_keys: bool  # extra keys are hashed with their kind, and an adapter with its path (0.31)
    unhashed_first: bool  # freed blocks without a hash are reused before any cached one (seen in 0.25.1, not in 0.22.1)
    whole_prompt_fits: bool  # a request starts only where all its tokens fit (0.22: scheduler_reserve_full_isl)
    fixed_seed: bool  # the seed of hashes is a constant where PYTHONHASHSEED is unset (0.30), before that random


def dialect_of(version: str) -> Dialect:
    """Return what a version does; one newer than 0.32 is taken for 0.32.

    Raises:
        ConfigError: the version is none, or older than 0.11.
    """
    number = parse_version(version)
    if number < OLDEST:
        raise ConfigError(f"version: vLLM {version} is older than 0.11, which is not simulated")
    stored = _since(_STORED_FIELDS, number)
    return Dialect(
        event_maps=number >= (0, 24),
        stored_fields=stored,
        stored_required=min(stored, 7),
        removed_fields=_since(_REMOVED_FIELDS, number),
        replay_topic=number >= (0, 26),
        tagged_keys=number >= (0, 31),
        unhashed_first=number >= (0, 25),
        whole_prompt_fits=number >= (0, 22),
        fixed_seed=number >= (0, 30),
    )


def _since(table: dict[tuple[int, int], int], number: tuple[int, ...]) -> int:
    return max(fields for first, fields in table.items() if number >= first)
