"""The hit rule under speculative decoding: EAGLE computes one unit of every hit again. Blocks have four tokens."""

import pytest

from schemas.profiles import Group, GroupClass, Profile
from tests.support.engines import FULL, pairs, profile
from tests.support.hits import hit

STATE = GroupClass("state", None, 4)
WINDOW = GroupClass("window", 9, 4)


def plain(drafting: str) -> Profile:
    return profile(pairs=pairs((FULL, "gpu")), drafting=drafting)


def windowed(drafting: str) -> Profile:
    groups = (Group(0, "full", 4), Group(1, "window", 4, 9))
    return profile(*groups, pairs=pairs((FULL, "gpu"), (WINDOW, "gpu")), drafting=drafting)


def recurrent(drafting: str) -> Profile:
    groups = (Group(0, "full", 4), Group(1, "state", 4))
    return profile(*groups, pairs=pairs((FULL, "gpu"), (STATE, "gpu")), drafting=drafting)


@pytest.mark.parametrize("drafting", ["drop_unit", "drop_unit_ahead"])
@pytest.mark.parametrize(
    ("drawing", "prompt_tokens", "tokens"),
    [("11111", 21, 16), ("11111", 20, 12), ("11.11", 21, 4), ("1", 9, 0), ("", 9, 0)],
)
def test_one_group_loses_one_block_of_every_hit(drafting: str, drawing: str, prompt_tokens: int, tokens: int) -> None:
    """A single group drops the last block of what it found below the last token, in every version."""
    assert hit(plain(drafting), drawing, prompt_tokens) == tokens


LOOK_AHEAD = [
    ("drop_unit", "33333", 20, 12),
    ("drop_unit_ahead", "33333", 20, 16),  # the block that is dropped may be the prompt's last
    ("drop_unit", "33333", 21, 16),
    ("drop_unit_ahead", "33333", 21, 16),
]


@pytest.mark.parametrize(("drafting", "drawing", "prompt_tokens", "tokens"), LOOK_AHEAD)
def test_several_groups_may_look_at_the_prompts_last_block(
    drafting: str, drawing: str, prompt_tokens: int, tokens: int
) -> None:
    """From 0.32 on a hybrid model finds one block more than it keeps, even where that block ends the prompt."""
    assert hit(windowed(drafting), drawing, prompt_tokens) == tokens
    assert hit(recurrent(drafting), drawing, prompt_tokens) == tokens


def test_a_window_needs_its_blocks_and_the_one_that_is_dropped() -> None:
    """The window covers its tokens before the hit's end, and the dropped block after it."""
    assert hit(windowed("drop_unit"), "11333", 21) == 16
    assert hit(windowed("drop_unit"), "11133", 21) == 0
    assert hit(windowed("drop_unit"), "13331", 21) == 12


def test_a_state_drops_nothing() -> None:
    """A checkpoint counts where the hit ends; nothing of it lies after that."""
    assert hit(recurrent("drop_unit"), "11131", 21) == 16
    assert hit(recurrent("drop_unit"), "11113", 21) == 0


def test_a_hit_loses_one_unit_whatever_the_largest_block_is() -> None:
    """Next to states of eight tokens a full group with blocks of four still loses four tokens (vLLM 0.32)."""
    eight = GroupClass("state", None, 8)
    groups = (Group(0, "full", 4), Group(1, "state", 8))
    mixed = profile(*groups, pairs=pairs((FULL, "gpu"), (eight, "gpu")), drafting="drop_unit_ahead")
    assert hit(mixed, "13131", 21) == 16


def test_a_match_unit_finer_than_the_block_is_what_drafting_takes() -> None:
    """With units of four in blocks of sixteen a hit of 32 loses four tokens, where a partial entry may end."""
    sixteen = (GroupClass("full", None, 16), GroupClass("state", None, 16))
    fine = profile(
        Group(0, "full", 16),
        Group(1, "state", 16),
        alignment=4,
        pairs=pairs((sixteen[0], "gpu"), (sixteen[1], "gpu")),
        drafting="drop_unit_ahead",
    )
    assert hit(fine, "...3..33", 33) == 28
