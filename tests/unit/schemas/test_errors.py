"""The error tree: every branch says who acts."""

import inspect

import pytest

from schemas import errors
from schemas.errors import (
    BadInput,
    BadRequest,
    BrokerUnavailable,
    ConfigError,
    FrameError,
    PipelineError,
    ProfileError,
    Stale,
    StaleIndex,
    StoreUnavailable,
    Unavailable,
)

BRANCHES: dict[type[PipelineError], type[PipelineError]] = {
    FrameError: BadInput,
    BadRequest: BadInput,
    ProfileError: BadInput,
    StoreUnavailable: Unavailable,
    BrokerUnavailable: Unavailable,
    StaleIndex: Stale,
    ConfigError: PipelineError,
}


@pytest.mark.parametrize("leaf", BRANCHES)
def test_an_error_hangs_on_the_branch_of_who_acts(leaf: type[PipelineError]) -> None:
    """Each leaf is caught by its branch, and by no other one."""
    assert leaf.__mro__[1] is BRANCHES[leaf]


def test_every_error_is_drawn_in_the_tree() -> None:
    """The module's drawing names every class that it defines."""
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert len(classes) == 11
    assert all(name in (errors.__doc__ or "") for name in classes)


def test_a_frame_error_carries_its_metric_label() -> None:
    """The reason is kept apart from the detail, and both are in the text."""
    error = FrameError("sequence", "7 bytes, expected 8")
    assert (error.reason, error.detail, str(error)) == (
        "sequence",
        "7 bytes, expected 8",
        "sequence: 7 bytes, expected 8",
    )
