"""What a store promises, on the memory store and on Redis with one shard and with three."""

from collections.abc import AsyncIterator

import pytest

from index.digests import index_digest
from index.fold import Cursor, Flush
from index.memory_store import MemoryStore
from index.redis_store import RedisStore
from index.store import Applied, HolderRow, Store
from schemas.errors import StaleIndex
from schemas.events import Heartbeat
from schemas.profiles import Holder
from tests.support.engines import HOLDER, profile
from tests.support.writes import beat_of, part, put, runs, write

OTHER = Holder("r", 1)
POOL = Holder("node7", None)
CHAIN = list(range(1_000, 1_400))  # four bands, the last one short
BRANCH = [*CHAIN[:150], *range(5_000, 5_100)]  # leaves the chain inside its second band
ALIVE = Heartbeat("live", {"0": 9}, 1.0, "")
REDIS = (pytest.mark.services, pytest.mark.redis)  # the fixture is asked for by name, where conftest.py does not see it


@pytest.fixture(
    params=[
        "memory",
        pytest.param("redis", marks=REDIS),
        pytest.param("redis of 3 shards", marks=REDIS),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, int] | None:
    """Where the store is: a server and a number of shards, or None for memory."""
    if request.param == "memory":
        return None
    return request.getfixturevalue("redis_url"), 3 if "3" in request.param else 1


@pytest.fixture
async def store(place: tuple[str, int] | None, unique_name: str) -> AsyncIterator[Store]:
    """A store with one empty model, whose name is `unique_name`."""
    if place is None:
        memory = MemoryStore()
        await memory.setup(unique_name)
        yield memory
        return
    url, shards = place
    redis = RedisStore.from_urls([url], shards)
    await redis.setup(unique_name)
    yield redis
    await redis.close()


@pytest.fixture
def model(unique_name: str) -> str:
    """The model's name."""
    return unique_name


async def row(store: Store, model: str, holder: Holder = HOLDER) -> HolderRow:
    return next(row for row in await store.holders(model) if row.holder == holder)


async def test_a_model_is_set_up_once(store: Store, model: str) -> None:
    """The second set-up finds the first one's data and says so."""
    await put(store, model, write(part(CHAIN[:3])))
    assert await store.setup(model) is False
    assert await runs(store, model, CHAIN[:3]) == {"r/0": [(0, 3, 1)]}


async def test_a_model_that_was_never_set_up_is_stale(store: Store, model: str) -> None:
    """Without an incarnation nothing answers, so that an empty store never looks like an empty fleet."""
    unknown = f"{model}-unknown"
    with pytest.raises(StaleIndex):
        await store.apply(Flush(unknown, None, []))
    with pytest.raises(StaleIndex):
        await store.find(unknown, b"\0" * 8)
    with pytest.raises(StaleIndex):
        await store.holders(unknown)


async def test_blocks_are_found_along_their_chain(store: Store, model: str) -> None:
    """A holder's blocks over several bands are one run; another chain finds nothing."""
    assert await put(store, model, write(part(CHAIN))) == Applied(applied=1)
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 400, 1)]}
    assert await runs(store, model, CHAIN[:130]) == {"r/0": [(0, 130, 1)]}
    assert await runs(store, model, range(9_000, 9_010)) == {}
    assert await runs(store, model, []) == {}


async def test_a_prompt_that_leaves_the_chain_finds_what_it_shares(store: Store, model: str) -> None:
    """Blocks after the first different one do not count, inside a band and at its end."""
    await put(store, model, write(part(CHAIN)))
    for shared in (1, 5, 127, 128, 129, 300):
        prompt = [*CHAIN[:shared], *range(7_000, 7_400 - shared)]
        assert await runs(store, model, prompt) == {"r/0": [(0, shared, 1)]}


async def test_branches_are_found_beside_their_trunk(store: Store, model: str) -> None:
    """Two holders share a trunk and then part; each is found as far as it has the prompt."""
    await put(store, model, write(part(CHAIN)), write(part(BRANCH), holder=OTHER))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 400, 1)], "r/1": [(0, 150, 1)]}
    assert await runs(store, model, BRANCH) == {"r/0": [(0, 150, 1)], "r/1": [(0, 250, 1)]}


async def test_a_branch_stored_first_does_not_hide_the_trunk(store: Store, model: str) -> None:
    """The order in which chains came changes no answer."""
    await put(store, model, write(part(BRANCH), holder=OTHER))
    await put(store, model, write(part(CHAIN)))
    await put(store, model, write(part([*BRANCH[:200], 1, 2, 3]), holder=POOL))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 400, 1)], "r/1": [(0, 150, 1)], "node7": [(0, 150, 1)]}
    assert await runs(store, model, BRANCH) == {"r/0": [(0, 150, 1)], "r/1": [(0, 250, 1)], "node7": [(0, 200, 1)]}


async def test_holes_and_residency_part_a_run(store: Store, model: str) -> None:
    """A removed block is a hole, a moved one a run of its own, and both can be mended."""
    await put(store, model, write(part(CHAIN)))
    await put(store, model, write(part(CHAIN, 3, 4, 0), part(CHAIN, 6, 8, 2), part(CHAIN, 126, 130, 3), sequence=2))
    assert await runs(store, model, CHAIN, gap=1) == {
        "r/0": [(0, 3, 1), (4, 2, 1), (6, 2, 2), (8, 118, 1), (126, 4, 3), (130, 270, 1)]
    }
    await put(store, model, write(part(CHAIN, 0, 400, 1), sequence=3))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 400, 1)]}


async def test_a_walk_ends_where_more_than_the_gap_is_missing(store: Store, model: str) -> None:
    """Blocks behind a hole of two are found with a gap of two or more."""
    await put(store, model, write(part(CHAIN, 0, 10), part(CHAIN, 12, 20)))
    assert (await runs(store, model, CHAIN, gap=2))["r/0"] == [(0, 10, 1), (12, 8, 1)]
    assert (await runs(store, model, CHAIN, gap=500))["r/0"] == [(0, 10, 1), (12, 8, 1)]
    assert (await runs(store, model, CHAIN))["r/0"][0] == (0, 10, 1)


async def test_blocks_without_their_beginning_are_found_with_any_gap(store: Store, model: str) -> None:
    """A holder with the middle of a prompt only is found where the walk may cross what is missing."""
    await put(store, model, write(part(CHAIN, 200, 300)))
    assert await runs(store, model, CHAIN, gap=400) == {"r/0": [(200, 100, 1)]}


async def test_one_holders_hole_does_not_end_anothers_run(store: Store, model: str) -> None:
    """The walk goes on where any holder has the block."""
    await put(store, model, write(part(CHAIN, 0, 5), part(CHAIN, 300, 400)), write(part(CHAIN), holder=OTHER))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 5, 1), (300, 100, 1)], "r/1": [(0, 400, 1)]}


async def test_a_repeat_changes_nothing(store: Store, model: str) -> None:
    """A write at or below its holder's fence is counted and ignored, even where it says something else."""
    await put(store, model, write(part(CHAIN[:5]), sequence=1, last=3))
    assert await put(store, model, write(part(CHAIN[:5], residency=0), sequence=2, last=3)) == Applied(repeated=1)
    assert await runs(store, model, CHAIN[:5]) == {"r/0": [(0, 5, 1)]}


async def test_a_write_that_overlaps_the_fence_is_applied(store: Store, model: str) -> None:
    """Records that were seen before and new ones in one write end in the new state, without a gap."""
    await put(store, model, write(part(CHAIN[:5]), sequence=1, last=3))
    assert await put(store, model, write(part(CHAIN[:7]), sequence=2, last=4)) == Applied(applied=1)
    assert (await row(store, model)).sequence == 4
    assert not (await row(store, model)).broken


async def test_a_new_life_forgets_the_old_one_at_once(store: Store, model: str) -> None:
    """The first record of a higher life drops every block, heartbeat and engine sequence of the life before."""
    await put(store, model, write(part(CHAIN), told={"0": 5, "1": 6}, profile=profile(), beat=ALIVE))
    await put(store, model, write(part(CHAIN[:2]), life=2, told={"0": 0}))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 2, 1)]}
    now = await row(store, model)
    assert (now.life, now.epoch, now.sequence, now.applied, now.broken) == (2, 0, 1, {"0": 0}, False)
    assert (now.state, now.received, now.age_s) == ("silent", {}, None)


async def test_a_new_life_has_no_profile_until_it_tells_one(store: Store, model: str) -> None:
    """Residency bits of a life whose first record was lost are not read by the profile of the life before."""
    await put(store, model, write(profile=profile()))
    await put(store, model, write(part(CHAIN[:2]), sequence=2, life=2))
    assert (await row(store, model)).profile is None


async def test_a_lower_life_is_refused(store: Store, model: str) -> None:
    """Late records of a life that is over are counted and change nothing (case C06)."""
    await put(store, model, write(part(CHAIN[:2]), life=5))
    assert await put(store, model, write(part(CHAIN), life=4, sequence=9)) == Applied(refused=1)
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 2, 1)]}


async def test_a_clear_drops_all_blocks_and_keeps_what_is_known(store: Store, model: str) -> None:
    """A new epoch empties the holder at once; its profile, sequences and heartbeat stay."""
    await put(store, model, write(part(CHAIN), told={"0": 5}, profile=profile(), beat=ALIVE))
    assert await put(store, model, write(part(CHAIN[:1]), sequence=2, epoch=2)) == Applied(applied=1)
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 1, 1)]}
    now = await row(store, model)
    assert (now.epoch, now.sequence, now.applied, now.profile) == (2, 2, {"0": 5}, profile())
    assert (now.state, now.received) == ("live", {"0": 9})


async def test_an_earlier_epoch_comes_too_late(store: Store, model: str) -> None:
    """Records from before a clear, delivered again after it, bring no block back."""
    await put(store, model, write(part(CHAIN[:5])), write(sequence=2, epoch=2))
    assert await put(store, model, write(part(CHAIN[:5]), sequence=1)) == Applied(repeated=1)
    assert await put(store, model, write(sequence=2, epoch=2)) == Applied(repeated=1)
    assert await runs(store, model, CHAIN) == {}


async def test_a_lost_record_marks_the_holder_until_a_new_life(store: Store, model: str) -> None:
    """A hole in the sequence is counted once and stays until everything is told anew."""
    await put(store, model, write())
    assert await put(store, model, write(sequence=3)) == Applied(applied=1, gaps=1)
    assert await put(store, model, write(sequence=5)) == Applied(applied=1)
    assert (await row(store, model)).broken
    await put(store, model, write(life=2))
    assert not (await row(store, model)).broken


async def test_a_holder_first_seen_in_the_middle_is_broken(store: Store, model: str) -> None:
    """A life that does not begin with its first record, nor with a clear, lacks something."""
    assert (await put(store, model, write(sequence=4))).gaps == 1
    assert (await row(store, model)).broken
    assert (await put(store, model, write(sequence=4, epoch=4, holder=OTHER))).gaps == 0
    assert not (await row(store, model, OTHER)).broken


async def test_a_heartbeat_tells_of_its_relay(store: Store, model: str) -> None:
    """A heartbeat brings state, reason and received sequences, with an age, and moves no fence."""
    await put(store, model, write(part(CHAIN[:2])))
    beat = Heartbeat("catching_up", {"0": 7, "1": 2}, 0.25, "replay")
    assert await put(store, model, beat_of(beat, 1)) == Applied()
    now = await row(store, model)
    assert (now.sequence, now.broken, now.state, now.reason) == (1, False, "catching_up", "replay")
    assert (now.received, now.share_known) == ({"0": 7, "1": 2}, 0.25)
    assert now.age_s is not None
    assert 0 <= now.age_s < 60


async def test_a_heartbeat_that_knows_more_shows_a_gap(store: Store, model: str) -> None:
    """A relay that has said more than arrived lost something on the way; the gap is counted once."""
    await put(store, model, write())
    assert await put(store, model, beat_of(ALIVE, 2)) == Applied(gaps=1)
    assert await put(store, model, beat_of(ALIVE, 3)) == Applied()
    assert (await row(store, model)).broken


async def test_a_heartbeat_of_a_life_that_is_over_is_not_heard(store: Store, model: str) -> None:
    """A relay that was replaced does not speak for the holder any more."""
    await put(store, model, write(life=2))
    assert await put(store, model, beat_of(ALIVE, 5, life=1)) == Applied()
    now = await row(store, model)
    assert (now.life, now.state, now.broken, now.age_s) == (2, "silent", False, None)


async def test_a_heartbeat_of_a_life_never_seen_shows_a_gap(store: Store, model: str) -> None:
    """What its relay said before is lost: of a holder that was never seen, and of one whose life before is over."""
    await put(store, model, write(part(CHAIN[:5]), profile=profile()))
    for holder, life in ((OTHER, 1), (HOLDER, 2)):
        assert await put(store, model, beat_of(ALIVE, 7, holder, life)) == Applied(applied=1, gaps=1)
        assert await put(store, model, beat_of(ALIVE, 7, holder, life)) == Applied()
        now = await row(store, model, holder)
        assert (now.life, now.sequence, now.broken, now.received) == (life, 7, True, {"0": 9})
        assert now.profile is None
    assert await runs(store, model, CHAIN) == {}
    await put(store, model, write(part(CHAIN[:3]), holder=OTHER, life=2))
    assert not (await row(store, model, OTHER)).broken


async def test_a_heartbeat_before_the_first_record_is_not_heard(store: Store, model: str) -> None:
    """A relay that has said nothing may still be reading what an earlier one said, to go on from there."""
    await put(store, model, write(part(CHAIN[:5])))
    assert await put(store, model, beat_of(ALIVE, 0, life=2), beat_of(ALIVE, 0, OTHER)) == Applied()
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 5, 1)]}
    assert [(row.holder, row.life, row.age_s) for row in await store.holders(model)] == [(HOLDER, 1, None)]


async def test_an_empty_store_knows_whom_to_expect(store: Store, model: str) -> None:
    """They are unknown until they are heard; then what they say holds, and others are not affected."""
    name = f"{model}-expecting"
    assert await store.setup(name, {HOLDER: profile(), OTHER: profile()}) is True
    assert await store.setup(name, {POOL: profile()}) is False  # it is not empty any more
    for holder in (HOLDER, OTHER):
        now = await row(store, name, holder)
        assert (now.life, now.sequence, now.profile, now.state, now.reason) == (
            0,
            0,
            profile(),
            "unknown",
            "rebuilding",
        )
        assert now.age_s is not None
    await put(store, name, write(part(CHAIN[:5]), life=3))
    now = await row(store, name)
    assert (now.life, now.profile, now.state, now.reason) == (3, profile(), "unknown", "rebuilding")
    await put(store, name, beat_of(ALIVE, 1, life=3))
    assert (await row(store, name)).state == "live"
    assert (await row(store, name, OTHER)).life == 0
    assert len(await store.holders(name)) == 2
    assert await runs(store, name, CHAIN) == {"r/0": [(0, 5, 1)]}


async def test_engine_sequences_are_kept_by_source(store: Store, model: str) -> None:
    """Each source of a holder has its own last sequence."""
    await put(store, model, write(told={"0": 1, "1": 10}, holder=POOL))
    await put(store, model, write(sequence=2, told={"1": 11}, holder=POOL))
    assert (await row(store, model, POOL)).applied == {"0": 1, "1": 11}


async def test_cursors_go_forward_only(store: Store, model: str) -> None:
    """A cursor is kept by topic and partition, and an older flush does not move it back."""
    for topic_id, partition, offset in [("t", 0, 5), ("t", 0, 3), ("t", 1, 9), ("u", 0, 1)]:
        await store.apply(Flush(model, Cursor(topic_id, partition, offset), []))
    assert await store.cursors(model) == {("t", 0): 5, ("t", 1): 9, ("u", 0): 1}


async def test_the_digest_is_over_all_blocks_of_a_holder(store: Store, model: str) -> None:
    """Digests equal the published one over (hash, residency); a holder nobody knows has that of nothing."""
    await put(store, model, write(part(CHAIN), part(BRANCH, 150, residency=2)), write(part(CHAIN[:9]), holder=OTHER))
    await put(store, model, write(part(CHAIN, 100, 300, 0), sequence=2))
    blocks = [(block, 1) for block in CHAIN[:100] + CHAIN[300:]] + [(block, 2) for block in BRANCH[150:]]
    assert await store.digest(model, HOLDER) == index_digest(blocks)
    assert await store.digest(model, OTHER) == index_digest((block, 1) for block in CHAIN[:9])
    assert await store.digest(model, POOL) == index_digest([])


async def test_models_never_meet(store: Store, model: str) -> None:
    """The same holder and chain in two models are two things."""
    other = f"{model}-b"
    await store.setup(other)
    await put(store, model, write(part(CHAIN[:5])))
    await put(store, other, write(part(CHAIN[:2]), life=7))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 5, 1)]}
    assert await runs(store, other, CHAIN) == {"r/0": [(0, 2, 1)]}
    assert (await row(store, other)).life == 7


async def test_names_may_hold_anything_printable(store: Store, model: str) -> None:
    """Holders and sources with slashes, blanks and letters of any script are kept as they are."""
    odd = Holder("team/a b {x} 模型", 12)
    await put(store, model, write(part(CHAIN[:1]), holder=odd, told={"tcp://[::1]:5557 é": 3}))
    assert await runs(store, model, CHAIN) == {"team/a b {x} 模型/12": [(0, 1, 1)]}
    assert (await row(store, model, odd)).applied == {"tcp://[::1]:5557 é": 3}


async def test_every_bit_of_a_residency_comes_back(store: Store, model: str) -> None:
    """All sixteen bits of a residency are kept."""
    await put(store, model, write(part(CHAIN, 0, 1, 0xFFFF), part(CHAIN, 1, 2, 0x8000), part(CHAIN, 2, 3, 0x0100)))
    assert await runs(store, model, CHAIN) == {"r/0": [(0, 1, 0xFFFF), (1, 1, 0x8000), (2, 1, 0x0100)]}


async def test_a_hash_of_any_bytes_is_a_block(store: Store, model: str) -> None:
    """Hashes with zero bytes, line ends and all ones are found again."""
    chain = [0, 0x0A0D0A0D0A0D0A0D, (1 << 64) - 1, 0x7B7D2A3F5B5D5C00, 1]
    await put(store, model, write(part(chain)))
    assert await runs(store, model, chain) == {"r/0": [(0, 5, 1)]}
    assert await store.digest(model, HOLDER) == index_digest((block, 1) for block in chain)


async def test_everything_that_was_stored_can_be_removed(store: Store, model: str) -> None:
    """Removing the blocks of two chains, ends first and in pieces, leaves nothing."""
    await put(store, model, write(part(CHAIN), part(BRANCH, 150)))
    pieces = [part(CHAIN, first, min(first + 7, 400), 0) for first in range(399, -1, -7)]
    await put(store, model, write(*pieces, part(BRANCH, 150, residency=0), part(CHAIN, 0, 7, 0), sequence=2))
    assert await runs(store, model, CHAIN, gap=1000) == {}
    assert await store.digest(model, HOLDER) == index_digest([])
