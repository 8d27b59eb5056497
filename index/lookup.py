"""A prompt against the index: hash it once for each kind of block, find the blocks, apply the hit rule."""

from collections.abc import Mapping, Sequence

import msgspec

from index.hashing import Media, Namespace, Tokens, chain_hashes, pack_hashes, root_hash
from index.join import PoolPart, unread_reason, with_pools
from index.match import Reach, Run, reusable_tokens
from index.rules import Rules, make_rules
from index.store import Found, Store
from schemas.profiles import Holder, Profile, Tier


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
    store: Store,
    prompt: Prompt,
    questions: Sequence[Question],
    pools: Sequence[Question] = (),
    *,
    secret: bytes = b"",
    whole_prompt: bool = False,
) -> dict[Holder, Reach]:
    """Return what each replica would reuse; holders of another unit than sent block hashes are left out.

    Args:
        questions: the replicas (ranks) asked about.
        pools: those that are believed; each counts for the replicas whose profile reads it.
    Raises:
        StaleIndex, StoreUnavailable: the store has no answer.
    """
    runs = await _runs_by_unit(store, prompt, [*questions, *pools], secret)
    joining = _Joining(prompt, pools, runs, whole_prompt=whole_prompt)
    answers: dict[Holder, Reach] = {}
    alike: dict[tuple[int, int], Reach] = {}  # most replicas have one of a few runs, by one set of rules
    for question in questions:
        own = runs.get(question.holder)
        if own is None:
            continue
        same = (id(own), id(question.rules))
        reach = alike.get(same)
        if reach is None:
            reach = reusable_tokens(own, question.rules, prompt.prompt_tokens, whole_prompt=whole_prompt)
            alike[same] = reach
        if question.profile.pools:
            reach = joining.with_pools_of(question, reach)
        answers[question.holder] = _marked(reach, question.profile, prompt)
    return answers


class _Joining:
    """The pools of one lookup, as the replicas that read them have them."""

    def __init__(
        self,
        prompt: Prompt,
        pools: Sequence[Question],
        runs: Mapping[Holder, Sequence[Run]],
        *,
        whole_prompt: bool,
    ) -> None:
        self._prompt = prompt
        self._runs = runs
        self._whole_prompt = whole_prompt
        self._pools = {pool.holder.name: pool for pool in pools}
        self._parts: dict[tuple[str, tuple[Tier, ...]], PoolPart] = {}  # the same for all who read the same tiers

    def with_pools_of(self, replica: Question, own: Reach) -> Reach:
        """Return what a replica reaches with its pools, and why some of them count for nothing."""
        read: list[tuple[Question, tuple[Tier, ...]]] = []
        marks: list[str] = []
        for use in replica.profile.pools:
            pool = self._pools.get(use.name)
            if pool is None:
                continue
            reason = unread_reason(pool.profile, replica.profile) if pool.holder in self._runs else "block_size"
            if reason:
                marks.append(f"pool {use.name}: {reason}")
            else:
                read.append((pool, use.tiers))
        asked = [self._part_of(pool, tiers) for pool, tiers in read]
        reach = with_pools(own, replica.rules, asked, self._prompt.prompt_tokens, whole_prompt=self._whole_prompt)
        for pool, _ in read:
            name = pool.holder.name
            said = _marks(pool.profile, self._prompt, credited=name in reach.pools)
            marks += [f"pool {name}: {mark}" for mark in said]
        return _with_marks(reach, marks)

    def _part_of(self, pool: Question, tiers: tuple[Tier, ...]) -> PoolPart:
        key = (pool.holder.name, tiers)
        if key not in self._parts:
            self._parts[key] = PoolPart(pool.profile, pool.rules, self._runs[pool.holder], tiers)
        return self._parts[key]


async def _runs_by_unit(
    store: Store, prompt: Prompt, questions: Sequence[Question], secret: bytes
) -> dict[Holder, Sequence[Run]]:
    """Return where the prompt's blocks are, hashed and looked up once for each kind of block."""
    runs: dict[Holder, Sequence[Run]] = {}
    for unit, pairs in sorted({_kind(q) for q in questions}):
        asked = [q for q in questions if _kind(q) == (unit, pairs)]
        chain = chain_of(prompt, unit, pairs=pairs, secret=secret)
        if chain is None:
            continue
        found = await store.find(prompt.model, chain, gap=max(q.rules.gap for q in asked)) if chain else Found({})
        runs.update((q.holder, found.runs.get(q.holder, ())) for q in asked)
    return runs


def _kind(question: Question) -> tuple[int, bool]:
    return question.profile.unit, question.profile.drafting == "pairs"


def _marked(reach: Reach, profile: Profile, prompt: Prompt) -> Reach:
    """Return the reach with what makes it less certain: namespaces that events hide, tiers that never remove."""
    marks = _marks(profile, prompt, credited=reach.tokens > 0)
    marks += [f"{tier}_never_removed" for tier in reach.by_tier if not profile.tier(tier).removals]
    return _with_marks(reach, marks)


def _with_marks(reach: Reach, marks: Sequence[str]) -> Reach:
    return msgspec.structs.replace(reach, marks=(*reach.marks, *marks)) if marks else reach


def _marks(profile: Profile, prompt: Prompt, *, credited: bool) -> list[str]:
    """Return what one holder's events leave open about this prompt."""
    hidden = profile.hidden_namespaces
    marks = list(profile.marks) if credited else []
    if prompt.salt is not None and "salt" in hidden:
        marks.append("salt_not_in_events")
    if prompt.adapter is not None and ("adapter" in hidden or "adapter_path" in hidden):
        marks.append("adapter_not_in_events")
    if credited and "extra_key" in hidden:
        marks.append("extra_keys_not_in_events")
    return marks


def chain_of(prompt: Prompt, unit: int, *, pairs: bool, secret: bytes) -> bytes | None:
    """Return the packed hashes of the prompt's blocks, or None where only those of another unit were sent."""
    if prompt.tokens is None:
        return prompt.hashes if prompt.block_size == unit and not pairs else None
    if not unit:
        return b""
    root = root_hash(Namespace(prompt.model, unit, pairs, prompt.adapter, prompt.salt), secret)
    return pack_hashes(chain_hashes(root, prompt.tokens, unit, pairs=pairs, media=prompt.media))
