"""A pool's relay without sockets: joins, bounds, restarts, and publishers that count over all models."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from relays.cache.block_table import Limits
from relays.dialects import EngineSettings, PoolSettings, vllm_profile
from relays.engine import EngineRank
from schemas.profiles import Holder, PoolUse
from tests.support.payloads import batch, map_removed, pack
from tests.support.pool_frames import file_message, frames, object_event, object_message
from tests.support.pool_world import POOL, PoolWorld, plain
from tests.support.vllm_frames import map_stored
from tests.support.vllm_names import names_of

UNIT, MAX_AGE_S = 4, 100.0
PROMPT = list(range(1, 22))  # five blocks and one token
OTHER = [9, *PROMPT[1:]]
SETTINGS = PoolSettings(block_size=UNIT, hash_seed="0", max_age_s=MAX_AGE_S)


def named(tokens: Sequence[int]) -> list[int]:
    return names_of(tokens, UNIT, "0")


class Replica:
    """An engine that computes prompts and forgets them, and so tells names."""

    def __init__(self, name: str = "r", model: str = "m", **facts: Any) -> None:
        facts = {"block_size": UNIT, "hash_seed": "0", "pools": (PoolUse(POOL),), **facts}
        self.engine = EngineRank(vllm_profile(model, name, "0.32.0", EngineSettings(**facts)), Holder(name, 0), 1)
        self._numbers = count()

    def tell(self, world: PoolWorld, *prompts: Sequence[int]) -> None:
        """Compute prompts, and let the index hear before they are gone."""
        for tokens in prompts:
            names, whole = named(tokens), tokens[: len(tokens) // UNIT * UNIT]
            for event in (map_stored(block_hashes=names, token_ids=whole), map_removed(block_hashes=names)):
                self.engine.take(next(self._numbers), pack(batch(event)))
                world.tell(self.engine)


def pooled(world: PoolWorld, tokens: Sequence[int] = PROMPT, name: str = "r", model: str = "m") -> int:
    """Return what a replica would load from the pool."""
    reach = world.reach(plain(tokens, model))[Holder(name, 0)]
    assert reach.tokens == reach.by_tier.get("pool", 0) == sum(reach.pools.get(POOL, {}).values())
    return reach.tokens


def started(kind: str = "llmd", **options: Any) -> tuple[PoolWorld, Replica]:
    """Return a pool whose relay has read what a replica told."""
    world, replica = PoolWorld(kind, SETTINGS, **options), Replica()
    replica.tell(world, PROMPT)
    world.catch_up()
    return world, replica


def said(kind: str, tokens: Sequence[int], sequence: int, model: str = "m") -> list[bytes]:
    return file_message(model, (kind, named(tokens)), sequence=sequence)


# ---- the join


def test_a_block_counts_once_its_place_is_known() -> None:
    """Told before or after by a replica; also where the replica has dropped it since."""
    world, replica = started()
    world.hear(said("stored", PROMPT, 1))
    world.hear(said("stored", OTHER, 2))
    world.beat()
    assert (pooled(world), pooled(world, OTHER)) == (20, 0)
    replica.tell(world, OTHER)
    world.read()
    world.beat()
    assert (pooled(world), pooled(world, OTHER)) == (20, 20)


def test_a_replica_that_does_not_read_the_pool_tells_no_places() -> None:
    """Nor one whose names are made another way: what they call a block may be another one of the pool's."""
    world = PoolWorld("llmd", SETTINGS)
    others: list[dict[str, Any]] = [{"pools": ()}, {"hash_seed": "1"}, {"pools": (PoolUse("elsewhere"),)}]
    for number, facts in enumerate(others):
        Replica(f"r{number}", **facts).tell(world, PROMPT)
    world.catch_up()
    world.hear(said("stored", PROMPT, 1))
    assert world.beat().reasons == ("r1: hash_mismatch: sha256 with seed '1', the pool sha256 with '0'",)
    assert world.source.pool.mirror.unplaced_blocks == 5


def test_a_pool_named_by_tokens_in_a_profile_is_said_to_be_none() -> None:
    """Its replica's records carry no names."""
    world = PoolWorld("llmd", SETTINGS)
    Replica(pools=(PoolUse(POOL, "tokens"),)).tell(world, PROMPT)
    world.catch_up()
    (reason,) = world.beat().reasons
    assert reason.endswith("r: named_by: tokens, and this store names blocks by engine hash")


def test_many_replicas_that_cannot_be_joined_are_not_all_named() -> None:
    """A heartbeat stays short."""
    world = PoolWorld("llmd", SETTINGS)
    for number in range(25):
        Replica(f"r{number:02}", hash_seed="1").tell(world, PROMPT)
    world.catch_up()
    (reason,) = world.beat().reasons
    assert (reason.count("hash_mismatch"), reason.endswith("; 5 replicas more")) == (20, True)


def test_what_is_remembered_is_bounded_and_counted() -> None:
    """Names that nobody places, places that nothing needs, and blocks; the newest stay."""
    world = PoolWorld("llmd", SETTINGS, limits=Limits(blocks=40, idle_hashes=8, unplaced_blocks=20))
    world.catch_up()
    mirror = world.source.pool.mirror
    for number in range(20):
        world.hear(said("stored", [number, *PROMPT[1:]], number + 1))
    assert (mirror.unplaced_blocks, mirror.counts["unplaced_dropped"]) == (20, 80)
    replica = Replica()
    replica.tell(world, *([number, *PROMPT[1:]] for number in range(20)))
    world.read()
    world.beat()
    assert mirror.unplaced_blocks == 0
    assert [pooled(world, [number, *PROMPT[1:]]) for number in range(20)] == [0] * 16 + [20] * 4
    replica.tell(world, *([100 + number, *PROMPT[1:]] for number in range(10)))
    world.read()
    assert mirror.nodes <= 4 * 5 + 8 + 5
    world.source.beat(world.now_s)


# ---- what comes over the wire


def test_publishers_count_over_all_models() -> None:
    """What one says of another model is no gap; a model that is not relayed is counted, and its messages too."""
    world = PoolWorld("llmd", SETTINGS, models=("m", "n"), publishers=2)
    for model in ("m", "n"):
        Replica(f"r-{model}", model).tell(world, PROMPT)
    world.catch_up()
    for sequence, model in enumerate(("m", "n", "elsewhere", "n", "m"), start=1):
        world.hear(said("stored", PROMPT[: 4 * sequence], sequence, model))
        world.hear(said("stored", [sequence] * 4, sequence, model), publisher=1)
    assert world.beat().state == world.judgement("n").state == "live"
    assert (pooled(world, name="r-m"), pooled(world, name="r-n", model="n")) == (20, 16)
    world.hear(said("removed", PROMPT, 7, "n"), publisher=1)
    assert world.beat().state == world.judgement("n").state == "stale"
    assert (pooled(world, name="r-m"), pooled(world, name="r-n", model="n")) == (20, 0)


@pytest.mark.parametrize(
    ("broken", "state"),
    [
        ([b"x"], "live"),
        (frames(b"kv@pod@m", 2, b""), "live"),
        ([b"kv@SHARED_STORAGE@m", b"\xff" * 8, b""], "live"),
        (frames(b"kv@SHARED_STORAGE@m", 2, b"\xc1"), "stale"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(broken: list[bytes], state: str) -> None:
    """Of the store itself it is a loss, for it may have said that blocks are gone."""
    world, _ = started()
    world.hear(said("stored", PROMPT, 1))
    world.hear(broken)
    world.hear(said("stored", PROMPT, 3 if broken[1:] and broken[1][-1] == 2 else 2))
    assert world.beat().state == state
    assert pooled(world) == 20


@pytest.mark.parametrize(("kind", "left"), [("llmd", 20), ("mooncake", 0)])
def test_a_sequence_that_goes_back(kind: str, left: int) -> None:
    """Mooncake's memory is what its master published, so a restarted one holds nothing; files outlive their writers."""
    world, _ = started(kind)
    if kind == "llmd":
        first, again = said("stored", PROMPT, 9), said("stored", PROMPT[:4], 1)
    else:
        events = [object_event("stored", hex(name), "cpu", name) for name in named(PROMPT)]
        first, again = object_message(*events, sequence=9), object_message(sequence=1)
    world.hear(first)
    world.beat()
    assert pooled(world) == 20
    life = world.source.life
    world.hear(again)
    world.beat()
    assert world.beat().state == ("stale" if left else "live")
    assert pooled(world) == left
    assert (world.source.life > life) is (left == 0)


# ---- a relay that is started again


def test_what_an_earlier_run_told_is_taken_up() -> None:
    """But for what this run has heard of meanwhile; doubted, for what went between the runs is not known."""
    world, replica = started()
    replica.tell(world, OTHER)
    world.read()
    world.hear(said("stored", PROMPT, 1))
    world.hear(said("stored", OTHER, 2))
    assert world.beat().state == "live"
    world.start()
    world.hear(file_message("m", ("removed", named(OTHER)[1:]), sequence=3))
    world.catch_up()
    assert world.beat().state == "stale"
    assert (pooled(world), pooled(world, OTHER)) == (20, 4)
    assert [world.beat(after_s=MAX_AGE_S / 2 + 1).state for _ in range(2)] == ["stale", "live"]
    assert pooled(world) == 0


def test_an_index_that_is_awaited_keeps_what_it_has() -> None:
    """Until the relay has read what an earlier run told, it says nothing that ends that."""
    world, _ = started()
    world.hear(said("stored", PROMPT, 1))
    world.beat()
    world.start()
    world.beat(after_s=1.0)
    assert pooled(world) == 20
    world.catch_up()
    world.beat()
    assert pooled(world) == 20


def test_a_life_that_was_not_told_to_its_end_does_not_count() -> None:
    """A relay that died while it told leaves the life before, which was told."""
    world, replica = started()
    replica.tell(world, OTHER)
    world.read()
    world.hear(said("stored", PROMPT, 1))
    world.beat()
    world.start()
    world.read()
    world.source.restore(world.now_s)
    world.hear(said("stored", OTHER, 2))
    world.speak(most=0)
    world.start()
    world.catch_up()
    world.beat()
    assert (pooled(world), pooled(world, OTHER)) == (20, 0)


def test_names_that_nobody_tells_any_more_do_not_come_back() -> None:
    """Such a block could never be removed."""
    world, _ = started()
    world.hear(said("stored", PROMPT, 1))
    world.beat()
    world.log["m"] = [value for value in world.log["m"] if b"shelf" in value[:20]]
    world.start()
    world.catch_up()
    world.beat()
    assert pooled(world) == 0


def test_more_than_can_be_remembered_is_not_believed() -> None:
    """Told by an earlier run, or heard meanwhile: the relay then begins with nothing, and speaks."""
    for heard in (False, True):
        world, _ = started()
        world.hear(said("stored", PROMPT[:4] if heard else PROMPT, 1))
        world.beat()
        world.limits = Limits(blocks=4)
        world.start()
        if heard:
            world.hear(said("stored", OTHER, 2))
            assert world.source.past is None
        world.catch_up()
        assert world.beat().state != "catching_up"
        assert pooled(world) == 0
