"""The hit rule with several groups: all of them must agree on one length. Blocks have four tokens."""

import pytest

from index.match import Reach
from schemas.profiles import Group, GroupClass, Profile
from tests.support.engines import FULL, pairs, profile
from tests.support.hits import hit, reach

WINDOW = GroupClass("window", 9, 4)  # the last eight tokens before L: two blocks
STATE = GroupClass("state", None, 4)

WINDOWED = profile(
    Group(0, "full", 4), Group(1, "window", 4, 9), pairs=pairs((FULL, "gpu"), (WINDOW, "gpu"), (FULL, "host"))
)
RECURRENT = profile(Group(0, "full", 4), Group(1, "state", 4), pairs=pairs((FULL, "gpu"), (STATE, "gpu")))

WINDOWS = [
    ("33333", 21, 20),
    ("11133", 21, 20),  # only the last two blocks are needed
    ("11333", 17, 16),
    ("11131", 21, 0),  # one block of two
    ("33111", 21, 8),
    ("31111", 21, 4),  # from the start on less than a window is enough
    ("11331", 21, 16),
    ("13.33", 21, 0),  # a hole in the full group, and at 8 the window lacks its first block
    ("22233", 21, 0),  # the full group lacks its own blocks
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "tokens"), WINDOWS)
def test_a_window_needs_the_blocks_before_the_end_of_the_hit(drawing: str, prompt_tokens: int, tokens: int) -> None:
    """Full and window groups agree on the longest L whose last window - 1 tokens are in blocks of the window."""
    assert hit(WINDOWED, drawing, prompt_tokens) == tokens


STATES = [
    ("33333", 21, 20),
    ("11311", 21, 12),
    ("31113", 20, 4),  # the last block is the prompt's last token's
    ("31113", 21, 20),
    ("111111", 25, 0),
    ("2222", 17, 0),
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "tokens"), STATES)
def test_a_state_needs_a_checkpoint_exactly_at_the_end(drawing: str, prompt_tokens: int, tokens: int) -> None:
    """Full and recurrent groups agree on the last checkpoint inside the unbroken prefix."""
    assert hit(RECURRENT, drawing, prompt_tokens) == tokens


def test_three_classes_settle_on_one_length() -> None:
    """Lowering one class's length sends the others down again until all of them agree."""
    mixed = profile(
        Group(0, "full", 4),
        Group(1, "window", 4, 9),
        Group(2, "state", 4),
        pairs=pairs((FULL, "gpu"), (WINDOW, "gpu"), (STATE, "gpu")),
    )
    # states end at 3, 4 and 7; the window allows 4 and 6; the full group reaches 6
    assert hit(mixed, "1177133", 99) == 16
    assert hit(mixed, "1175133", 99) == 0


def test_groups_with_different_blocks_meet_at_a_common_multiple() -> None:
    """Full blocks of four and states of eight tokens agree at multiples of eight."""
    eight = GroupClass("state", None, 8)
    mixed = profile(Group(0, "full", 4), Group(1, "state", 8), pairs=pairs((FULL, "gpu"), (eight, "gpu")))
    assert hit(mixed, "131313", 24) == 16
    assert hit(mixed, "131313", 25) == 24
    assert hit(mixed, "1313", 99) == 16
    assert hit(mixed, "13111", 99) == 8


PARTIAL = profile(
    Group(0, "full", 16),
    Group(1, "state", 16),
    alignment=4,
    pairs=pairs((GroupClass("full", None, 16), "gpu"), (GroupClass("state", None, 16), "gpu")),
)

PARTIALS = [
    ("...3", 17, 16),
    ("...3..3.", 33, 28),  # a partial entry of both groups at 28
    ("...3..1.", 33, 16),  # the state has no entry there
    ("...3..2.", 33, 16),  # the full group has none
    ("...3.3.", 25, 24),
    (".3..", 17, 8),
    (".2.1", 17, 8),  # a full block reaches over a state inside it
    ("..3.", 12, 0),  # the partial entry ends with the prompt's last token
    ("..3.", 13, 12),
]


@pytest.mark.parametrize(("drawing", "prompt_tokens", "tokens"), PARTIALS)
def test_a_partial_block_is_a_boundary_of_its_own(drawing: str, prompt_tokens: int, tokens: int) -> None:
    """With a match unit finer than the block an entry inside a block ends a hit exactly there (vLLM, 0.28)."""
    assert hit(PARTIAL, drawing, prompt_tokens) == tokens


def test_a_partial_entry_covers_what_lies_before_it_in_its_block() -> None:
    """A full group's entry at 12 serves a state at 4 (vLLM: a full group's hit is downward closed)."""
    assert hit(PARTIAL, "2.1.", 17) == 4


def test_a_whole_block_beyond_the_last_token_does_not_serve_its_inside() -> None:
    """A full block that ends with the prompt is not looked up, so without a partial entry its inside is a miss."""
    assert hit(PARTIAL, ".2.1", 17) == 8
    assert hit(PARTIAL, ".2.1", 16) == 0


def tiered(*parts: tuple[GroupClass, str]) -> Profile:
    return profile(Group(0, "full", 4), Group(1, "window", 4, 9), pairs=pairs(*parts))  # type: ignore[arg-type]


def test_a_block_counts_under_the_slowest_tier_that_is_needed_there() -> None:
    """Where the window's blocks are on the host only, the hit's end counts as host, its beginning as GPU."""
    split = tiered((FULL, "gpu"), (WINDOW, "gpu"), (FULL, "host"), (WINDOW, "host"))
    assert reach(split, "11199", 21) == Reach(20, {"gpu": 12, "host": 8})
    assert reach(split, "9911b", 21) == Reach(8, {"host": 8})
    assert reach(split, "41133", 21) == Reach(20, {"host": 4, "gpu": 16})


def test_a_whole_block_counts_under_its_own_tier() -> None:
    """A partial entry on the host inside a block that is on the GPU does not slow the block down."""
    sixteen = GroupClass("full", None, 16)
    mixed = profile(Group(0, "full", 16), alignment=4, pairs=pairs((sixteen, "gpu"), (sixteen, "host")))
    assert reach(mixed, ".2.1", 17) == Reach(16, {"gpu": 16})
