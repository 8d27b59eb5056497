"""The hit rule with vLLM's connectors: a device hit, then a lower tier from where it ends. Blocks have four tokens."""

from typing import Literal

import pytest

from index.match import Reach
from schemas.profiles import Group, GroupClass, Profile
from tests.support.engines import FULL, pairs, profile, tiers
from tests.support.hits import hit, reach

LastToken = Literal["never", "uncounted", "counted"]
STATE = GroupClass("state", None, 4)
WINDOW = GroupClass("window", 9, 4)


def simple(chunk: int = 1, last_token: LastToken = "never") -> Profile:
    """Return a plain model with a host tier: bit 1 is GPU, bit 2 host."""
    return profile(
        pairs=pairs((FULL, "gpu"), (FULL, "host")),
        tiers=tiers("gpu", "host", chunk=chunk, last_token=last_token),
        tier_walk="device_then_lower",
    )


def offloading(chunk: int = 1, last_token: LastToken = "counted") -> Profile:
    return simple(chunk, last_token)


SIMPLE = [
    ("1122", 17, {"gpu": 8, "host": 8}),
    ("1122", 16, {"gpu": 8, "host": 4}),  # block-aligned, and never the last token
    ("2222", 17, {"host": 16}),
    ("1.22", 17, {"gpu": 4}),
    ("1221", 17, {"gpu": 4, "host": 8}),  # a device block behind lower ones does not count
    ("1321", 17, {"gpu": 8, "host": 4}),  # a block in both is the device's
    (".222", 17, {}),
    ("1111", 17, {"gpu": 16}),
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "by_tier"), SIMPLE)
def test_the_host_goes_on_where_the_device_ends(drawing: str, prompt_tokens: int, by_tier: dict[str, int]) -> None:
    """SimpleCPUOffloadConnector applies the device's rule to the blocks that follow the device's hit."""
    found = reach(simple(), drawing, prompt_tokens)
    assert found.by_tier == by_tier
    assert found.tokens == sum(by_tier.values())


OFFLOADING = [
    ("1122", 17, "counted", 16),
    ("1122", 16, "counted", 16),  # a load may cover the whole prompt
    ("1122", 16, "uncounted", 15),  # up to 0.14 the token that is computed again is not reported
    ("1122", 17, "uncounted", 16),
    ("1111", 16, "counted", 12),  # the device alone never covers the last token
    ("1112", 16, "counted", 16),
    ("1112", 16, "uncounted", 15),
    ("1.22", 17, "counted", 4),
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "last_token", "tokens"), OFFLOADING)
def test_a_load_may_cover_the_last_token(drawing: str, prompt_tokens: int, last_token: LastToken, tokens: int) -> None:
    """OffloadingConnector loads the last block too; whether its last token counts depends on the version."""
    assert hit(offloading(last_token=last_token), drawing, prompt_tokens) == tokens


CHUNKS = [
    (".2.2.2", 25, 24),  # three chunks of two blocks, each marked at its last
    (".2.2.2", 24, 24),
    (".2.2.2", 23, 16),
    ("13.2.2", 25, 24),  # the device ends at a chunk's end
    ("1112.2", 25, 24),  # ... or inside one, which must itself be there
    ("111..2", 25, 12),
    ("1112", 16, 12),  # less than a chunk is not loaded
    ("12.2", 17, 16),
    ("1..2", 17, 4),
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "tokens"), CHUNKS)
def test_only_whole_chunks_are_loaded(drawing: str, prompt_tokens: int, tokens: int) -> None:
    """With chunks of two blocks the run starts at the chunk that holds the device's end, and brings at least one."""
    assert hit(offloading(chunk=2), drawing, prompt_tokens) == tokens


def test_what_a_chunk_brings_counts_from_the_devices_end() -> None:
    """The part of a chunk that the device has already is the device's."""
    assert reach(offloading(chunk=2), "1112.2", 25) == Reach(24, {"gpu": 12, "host": 12})


def windowed(last_token: LastToken) -> Profile:
    """Return full and window groups: bits 1 and 2 are the GPU's, 4 and 8 the host's."""
    return profile(
        Group(0, "full", 4),
        Group(1, "window", 4, 9),
        pairs=pairs((FULL, "gpu"), (WINDOW, "gpu"), (FULL, "host"), (WINDOW, "host")),
        tiers=tiers("gpu", "host", last_token=last_token),
        tier_walk="device_then_lower",
    )


def test_the_hosts_window_may_be_cut_off_at_the_devices_end() -> None:
    """A short run of the window's blocks that starts where the device ends is enough."""
    assert hit(windowed("never"), "33c", 13) == 12
    assert hit(windowed("never"), "334cc", 21) == 20
    assert hit(windowed("never"), "33444", 21) == 8
    assert hit(windowed("never"), "3344c", 21) == 8


def test_a_window_model_loads_one_token_less_than_the_prompt() -> None:
    """With a window group OffloadingConnector stops one token short, inside a block (vLLM 0.32: 128 gives 127)."""
    assert hit(windowed("counted"), "cccc", 16) == 15
    assert hit(windowed("counted"), "cccc", 15) == 12
    assert hit(windowed("counted"), "cccc", 17) == 16


def test_a_recurrent_model_loads_whole_checkpoints() -> None:
    """With a state group the load ends at a checkpoint below the last token (vLLM 0.25: rounded down to its chunk)."""
    recurrent = profile(
        Group(0, "full", 4),
        Group(1, "state", 4),
        pairs=pairs((FULL, "gpu"), (STATE, "gpu"), (FULL, "host"), (STATE, "host")),
        tiers=tiers("gpu", "host", last_token="counted"),
        tier_walk="device_then_lower",
    )
    assert hit(recurrent, "cccc", 17) == 16
    assert hit(recurrent, "cc4c", 17) == 16
    assert hit(recurrent, "ccc4", 17) == 12
    assert hit(recurrent, "cccc", 16) == 12


DRAFTED = [
    ("never", "2222", 17, 12),
    ("never", "2222", 16, 8),  # the last token's block is not looked for, and what is found loses one
    ("never", "1322", 17, 12),  # the device's own block is computed again, or loaded
    ("counted", "2222", 17, 12),
    ("counted", "2222", 16, 12),
    ("counted", "1322", 17, 12),
    ("counted", "1122", 17, 4),  # the host lacks the block that the device lost
    ("counted", "2", 17, 0),
]


@pytest.mark.parametrize(("last_token", "drawing", "prompt_tokens", "tokens"), DRAFTED)
def test_drafting_takes_a_block_of_the_host_too(
    last_token: LastToken, drawing: str, prompt_tokens: int, tokens: int
) -> None:
    """A draft model computes the last block again that either tier finds."""
    drafted = profile(
        pairs=pairs((FULL, "gpu"), (FULL, "host")),
        tiers=tiers("gpu", "host", last_token=last_token, drafting=True),
        tier_walk="device_then_lower",
        drafting="drop_unit",
    )
    assert hit(drafted, drawing, prompt_tokens) == tokens


def test_drafting_takes_a_whole_chunk() -> None:
    """What is loaded in chunks of two blocks loses two; where only one chunk is found nothing is left."""
    drafted = profile(
        pairs=pairs((FULL, "gpu"), (FULL, "host")),
        tiers=tiers("gpu", "host", chunk=2, last_token="counted", drafting=True),
        tier_walk="device_then_lower",
        drafting="drop_unit",
    )
    assert hit(drafted, ".2.2.2", 25) == 16
    assert hit(drafted, ".2", 25) == 0
