"""What every simulated engine refuses of a request; pure."""

from collections.abc import Sequence

from schemas.errors import BadRequest


def check_request(tokens: Sequence[int], completion: Sequence[int], longest: int) -> None:
    """Return where an engine can run a request.

    Args:
        longest: tokens that it can hold of one, the completion included.
    Raises:
        BadRequest: it is empty, generates nothing, or is longer than that.
    """
    if not tokens:
        raise BadRequest("prompt: no tokens")
    if not completion:
        raise BadRequest("max_tokens: must be at least 1")
    if len(tokens) + len(completion) > longest:
        raise BadRequest(f"prompt: {len(tokens)} tokens, and {len(completion)} to generate, are more than {longest}")
