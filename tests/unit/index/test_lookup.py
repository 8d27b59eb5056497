"""A prompt against the index: hashed once per kind of block, answered per holder."""

from collections.abc import Sequence

import msgspec

from index.fold import Flush, fold
from index.hashing import Media, pack_hashes, pack_tokens
from index.lookup import Prompt, Question, ask, chain_of, reaches
from index.match import NOTHING, Reach
from index.memory_store import MemoryStore
from index.store import Found
from schemas.profiles import Group, GroupClass, HashScheme, Holder, PoolUse
from tests.support.engines import FULL, chain, pairs, profile, tiers, tokens
from tests.support.records import record, run

WARM = Holder("r", 0)
COLD = Holder("r", 1)
PLAIN = profile(pairs=pairs((FULL, "gpu")))


class Asked(MemoryStore):
    """A memory store that remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []  # blocks, gap

    async def find(self, model: str, chain: bytes, *, gap: int = 0) -> Found:
        self.calls.append((len(chain) // 8, gap))
        return await super().find(model, chain, gap=gap)


async def warm_store(blocks: Sequence[int], holder: Holder = WARM) -> Asked:
    store = Asked()
    await store.setup("m")
    await store.apply(Flush("m", None, fold([record(run(blocks), holder=holder)])))
    return store


def prompt(blocks: int) -> Prompt:
    """Return a prompt of whole blocks and one token more."""
    return Prompt("m", blocks * 4 + 1, pack_tokens([*tokens(blocks), 9999]))


async def test_each_holder_is_answered_alone() -> None:
    """The holder with the blocks reaches them, the one without reaches nothing."""
    store = await warm_store(chain(tokens(3)))
    answers = await reaches(store, prompt(3), [ask(WARM, PLAIN), ask(COLD, PLAIN)])
    assert answers == {WARM: Reach(12, {"gpu": 12}), COLD: NOTHING}


async def test_a_prompt_is_hashed_and_looked_up_once_for_each_unit() -> None:
    """Two holders of one unit share a look-up, a third of another unit costs one more; the widest gap is asked for."""
    store = await warm_store(chain(tokens(4)))
    wide = profile(Group(0, "full", 8), unit=4, pairs=pairs((GroupClass("full", None, 8), "gpu")))
    other = profile(unit=2, pairs=pairs((GroupClass("full", None, 2), "gpu")))
    questions = [ask(WARM, PLAIN), ask(COLD, wide), ask(Holder("s", 0), other)]
    answers = await reaches(store, prompt(4), questions)
    assert store.calls == [(8, 0), (4, 1)]
    assert {str(holder): answer.tokens for holder, answer in answers.items()} == {"r/0": 16, "r/1": 0, "s/0": 0}


async def test_salt_adapter_and_media_are_part_of_what_is_asked() -> None:
    """Blocks of a namespace and of an image are found by a prompt that names both, and by no other."""
    media = (Media("img", 4, 4),)
    store = await warm_store(chain(tokens(3), adapter="ab", salt="c", media=media))
    packed = pack_tokens([*tokens(3), 9999])
    same = Prompt("m", 13, packed, adapter="ab", salt="c", media=media)
    others = [
        Prompt("m", 13, packed),
        Prompt("m", 13, packed, adapter="a", salt="bc", media=media),
        Prompt("m", 13, packed, salt="c", media=media),
    ]
    assert (await reaches(store, same, [ask(WARM, PLAIN)]))[WARM].tokens == 12
    for other in others:
        assert (await reaches(store, other, [ask(WARM, PLAIN)]))[WARM] is NOTHING
    elsewhere = Prompt("m", 13, packed, adapter="ab", salt="c", media=(Media("other", 4, 4),))
    assert (await reaches(store, elsewhere, [ask(WARM, PLAIN)]))[WARM].tokens == 4


async def test_the_deployment_secret_changes_every_block() -> None:
    """Without the secret that a store was written with nothing is found."""
    store = await warm_store(chain(tokens(2)))
    assert (await reaches(store, prompt(2), [ask(WARM, PLAIN)], secret=b"x"))[WARM] is NOTHING


async def test_sent_hashes_answer_for_their_own_unit_only() -> None:
    """Block hashes of one size leave holders of another size, and of pairs, without an answer."""
    store = await warm_store(chain(tokens(2)))
    sent = Prompt("m", 9, hashes=pack_hashes(chain(tokens(2))), block_size=4)
    other = ask(COLD, profile(unit=8))
    paired = ask(Holder("s", 0), profile(drafting="pairs"))
    answers = await reaches(store, sent, [ask(WARM, PLAIN), other, paired])
    assert {str(holder): answer.tokens for holder, answer in answers.items()} == {"r/0": 8}


async def test_a_prompt_without_a_whole_block_asks_nobody() -> None:
    """Fewer tokens than a block are answered without a look-up."""
    store = await warm_store(chain(tokens(1)))
    assert await reaches(store, Prompt("m", 3, pack_tokens([1, 2, 3])), [ask(WARM, PLAIN)]) == {WARM: NOTHING}
    assert store.calls == []


async def test_a_holder_whose_unit_is_not_known_yet_reaches_nothing() -> None:
    """A holder that has not stored anything has no unit, and answers 0 instead of failing."""
    store = await warm_store(chain(tokens(1)))
    unknown: Question = ask(COLD, profile(unit=0))
    assert await reaches(store, prompt(2), [unknown]) == {COLD: NOTHING}


def test_a_chain_of_pairs_has_one_block_less_at_a_boundary() -> None:
    """Eight tokens are two blocks of four tokens, and one block of four pairs."""
    eight = Prompt("m", 8, pack_tokens(tokens(2)))
    assert len(chain_of(eight, 4, pairs=False, secret=b"") or b"") == 16
    assert len(chain_of(eight, 4, pairs=True, secret=b"") or b"") == 8


# ---- pools

SHELF = Holder("shelf", None)
STORE = msgspec.structs.replace(profile(tiers=tiers("host"), pairs=pairs((FULL, "host"))), name="shelf")
READER = profile(pairs=pairs((FULL, "gpu")), pools=(PoolUse("shelf"),))


async def test_a_pool_counts_for_those_who_read_it() -> None:
    """The others find what they have themselves; the pool is looked up once for all."""
    store = await warm_store(chain(tokens(3)), SHELF)
    answers = await reaches(store, prompt(3), [ask(WARM, READER), ask(COLD, PLAIN)], [ask(SHELF, STORE)])
    assert answers == {WARM: Reach(12, {"pool": 12}, pools={"shelf": {"host": 12}}), COLD: NOTHING}
    assert store.calls == [(3, 0)]


async def test_a_pool_that_cannot_be_read_says_why() -> None:
    """Its names differ, its blocks are others than the hashes that were sent, or the model's groups are not told."""
    store = await warm_store(chain(tokens(2)), SHELF)
    named = profile(pairs=pairs((FULL, "gpu")), hash_only_stores=True, hash=HashScheme("sha256", "1"))
    wide = profile(unit=8, pairs=pairs((GroupClass("full", None, 8), "gpu")))
    hybrid = profile(Group(0, "full", 4), Group(1, "window", 4, 9), pools=READER.pools)
    sent = Prompt("m", 9, hashes=pack_hashes(chain(tokens(2))), block_size=4)
    for pool, reader, reason in (
        (named, READER, "hash_mismatch: the seed of pool or replica is not known"),
        (wide, READER, "block_size"),
        (STORE, hybrid, "groups_not_told"),
        (STORE, profile(unit=0, pools=READER.pools), "block_size_unknown"),
    ):
        asked = prompt(2) if reader.unit == 0 else sent
        answers = await reaches(store, asked, [ask(WARM, reader)], [ask(SHELF, pool)])
        assert answers[WARM] == Reach(0, {}, marks=(f"pool shelf: {reason}",))


async def test_what_a_pools_events_hide_is_said() -> None:
    """Its marks where it is credited; a salt that they do not tell, in any case."""
    store = await warm_store(chain(tokens(2)), SHELF)
    shelf = msgspec.structs.replace(STORE, hidden_namespaces=("salt",), marks=("namespaces_unchecked",))
    plain = prompt(2)
    for asked, mark in (
        (plain, "namespaces_unchecked"),
        (msgspec.structs.replace(plain, salt="s"), "salt_not_in_events"),
    ):
        answers = await reaches(store, asked, [ask(WARM, READER)], [ask(SHELF, shelf)])
        assert answers[WARM].marks == (f"pool shelf: {mark}",)
