"""A prompt against the index: hash it once for each kind of block, find the blocks, apply the hit rule."""

from collections.abc import Sequence

import msgspec

from index.hashing import Media, Namespace, Tokens, chain_hashes, pack_hashes, root_hash
from index.match import NOTHING, Reach, Rules, make_rules, reusable_tokens
from index.store import Store
from schemas.profiles import Holder, Profile


class Prompt(msgspec.Struct, frozen=True):
    """What is asked about, in the caller's words."""

    model: str
    prompt_tokens: int
    tokens: Tokens | None = None  # None where the caller sent block hashes
    hashes: bytes = b""  # packed u64, of blocks of `block_size` tokens
    block_size: int | None = None
    adapter: str | None = None
    salt: str | None = None
    media: tuple[Media, ...] = ()


class Question(msgspec.Struct, frozen=True):
    """One holder that the prompt is matched against."""

    holder: Holder
    profile: Profile
    rules: Rules


def ask(holder: Holder, profile: Profile) -> Question:
    """Return the question about one holder."""
    return Question(holder, profile, make_rules(profile))


async def reaches(
    store: Store, prompt: Prompt, questions: Sequence[Question], *, secret: bytes = b"", whole_prompt: bool = False
) -> dict[Holder, Reach]:
    """Return what each holder would reuse; holders of another unit than sent block hashes are left out.

    Raises:
        StaleIndex, StoreUnavailable: the store has no answer.
    """
    answers: dict[Holder, Reach] = {}
    for unit, pairs in sorted({(q.profile.unit, q.profile.drafting == "pairs") for q in questions}):
        asked = [q for q in questions if (q.profile.unit, q.profile.drafting == "pairs") == (unit, pairs)]
        chain = chain_of(prompt, unit, pairs=pairs, secret=secret)
        if chain is None:
            continue
        if not unit or not chain:
            answers.update((q.holder, NOTHING) for q in asked)
            continue
        found = await store.find(prompt.model, chain, gap=max(q.rules.gap for q in asked))
        for question in asked:
            runs = found.runs.get(question.holder, ())
            answers[question.holder] = reusable_tokens(
                runs, question.rules, prompt.prompt_tokens, whole_prompt=whole_prompt
            )
    return answers


def chain_of(prompt: Prompt, unit: int, *, pairs: bool, secret: bytes) -> bytes | None:
    """Return the packed hashes of the prompt's blocks, or None where only those of another unit were sent."""
    if prompt.tokens is None:
        return prompt.hashes if prompt.block_size == unit and not pairs else None
    if not unit:
        return b""
    root = root_hash(Namespace(prompt.model, unit, pairs, prompt.adapter, prompt.salt), secret)
    return pack_hashes(chain_hashes(root, prompt.tokens, unit, pairs=pairs, media=prompt.media))
