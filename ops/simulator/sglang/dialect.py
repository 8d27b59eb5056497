"""What versions of SGLang do differently, as far as a plain full-attention model shows it; pure."""

from typing import Literal

import msgspec

from relays.dialects import parse_version
from schemas.errors import ConfigError

OLDEST = (0, 5, 6)

Format = Literal["default", "dynamo"]
"""`format` of --kv-events-config, 0.5.22 and newer: whether event hashes are told apart by namespace."""


class Dialect(msgspec.Struct, frozen=True):
    """One version's ways.

    Source: mem_cache/events.py (radix_cache.py up to 0.5.10), mem_cache/hiradix_cache.py, mem_cache/common.py and
    disaggregation/kv_events.py of the PyPI wheels 0.5.8, 0.5.10.post1, 0.5.11, 0.5.15 to 0.5.18, 0.5.20 and 0.5.23; for
    the versions between, engines/other-engines.md 1.1 to 1.4 and 1.8. That removals of different extra keys are apart
    is the way of the tree core in Rust, the default from 0.5.21 on: seen in recordings of 0.5.23.
    """

    event_maps: bool  # events are maps (0.5.20), before that arrays
    cut_defaults: bool  # arrays end where only defaults follow (up to 0.5.16)
    medium: bool  # events name their tier (0.5.9)
    host_events: bool  # what the host tier does is told (0.5.11); before, only that a page left it, as a device removal
    # the host tier is HiRadixCache's (up to 0.5.18): it keeps copies of what the device has, tells write-backs after
    # the removals, and makes room for all that it loads
    hiradix: bool
    # what one removal covers: a page, a node (0.5.15), nodes in a row (0.5.18), those of one extra key (0.5.21)
    removals: Literal["page", "node", "row", "row_of_key"]
    joined_stores: bool  # stores that follow each other are one event (0.5.18), before that one a page
    salts: bool  # a salt is a namespace of its own, in hashes and events (0.5.18), before that a part of the extra key
    adapters: bool  # an adapter is in hashes and events (0.5.23; 0.5.22 in the dynamo format)
    namespaced: bool  # salt and extra key are in every event hash (the dynamo format, 0.5.22)
    wide_tokens: bool  # tokens past 2^32 are hashed in 64 bits (0.5.23)
    whole_demand: bool  # room is made for all that is asked for, whatever is free (up to 0.5.16)
    replay_topic: bool  # a replay's messages name the topic (0.5.22)


def dialect_of(version: str, event_format: Format = "default") -> Dialect:
    """Return what a version does; one newer than 0.5.23 is taken for 0.5.23.

    Raises:
        ConfigError: the version is none, or older than 0.5.6; a format that it does not have.
    """
    number = parse_version(version)
    if number < OLDEST:
        raise ConfigError(f"version: SGLang {version} is older than 0.5.6, which is not simulated")
    dynamo = event_format == "dynamo"
    if dynamo and number < (0, 5, 22):
        raise ConfigError(f"event_format: SGLang {version} has no dynamo format")
    return Dialect(
        event_maps=number >= (0, 5, 20),
        cut_defaults=number < (0, 5, 17),
        medium=number >= (0, 5, 9),
        host_events=number >= (0, 5, 11),
        hiradix=number < (0, 5, 19),
        removals=_removals(number),
        joined_stores=number >= (0, 5, 18),
        salts=number >= (0, 5, 18),
        adapters=number >= (0, 5, 23) or dynamo,
        namespaced=dynamo,
        wide_tokens=number >= (0, 5, 23),
        whole_demand=number < (0, 5, 17),
        replay_topic=number >= (0, 5, 22),
    )


def _removals(number: tuple[int, ...]) -> Literal["page", "node", "row", "row_of_key"]:
    if number < (0, 5, 15):
        return "page"
    if number < (0, 5, 18):
        return "node"
    return "row" if number < (0, 5, 21) else "row_of_key"
