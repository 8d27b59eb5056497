"""The simulated engine's block pool."""

import pytest

from ops.simulator.block_pool import Block, BlockPool
from ops.simulator.chain import Chain, HashScheme, announced, root_of
from schemas.vllm import AllBlocksCleared, BlockRemoved, BlockStored

SCHEME = HashScheme(root_of("0"), 4, tagged_keys=True)


def pool_of(blocks: int, *, unhashed_first: bool = True) -> BlockPool:
    return BlockPool(blocks, 4, unhashed_first=unhashed_first)


def prompt(*blocks: int, rest: int = 1) -> Chain:
    """Return a prompt of whole blocks, each named by a number, and some tokens more."""
    return Chain(SCHEME, [token for block in blocks for token in range(block * 10, block * 10 + 4)] + [7] * rest)


def fill(pool: BlockPool, chain: Chain) -> list[Block]:
    """Compute a prompt without looking for hits, and return its blocks, still held."""
    blocks = pool.allocate(-(-len(chain.tokens) // 4))
    pool.store(chain, blocks, 0, len(chain.hashes))
    return blocks


def test_one_block_is_never_used() -> None:
    pool = pool_of(9)
    assert pool.free_blocks == 8
    assert pool.capacity_tokens == 32


def test_a_hit_is_the_longest_run_of_whole_blocks() -> None:
    pool = pool_of(9)
    pool.release(fill(pool, prompt(1, 2, 3)))
    assert len(pool.find(prompt(1, 2, 4))) == 2
    assert not pool.find(prompt(2, 3))


def test_a_hit_leaves_the_last_token_out() -> None:
    pool = pool_of(9)
    pool.release(fill(pool, prompt(1, 2)))
    assert len(pool.find(prompt(1, 2, rest=0))) == 1


def test_a_block_that_equals_a_cached_one_is_a_second_copy() -> None:
    pool = pool_of(9)
    chain = prompt(1)
    pool.release(fill(pool, chain))
    pool.release(fill(pool, chain))
    name = announced(chain.hashes[0])
    assert pool.table() == {name: 2}
    assert [event.block_hashes for event in pool.take_events() if isinstance(event, BlockStored)] == [[name], [name]]


def test_each_copy_has_its_own_removal() -> None:
    pool = pool_of(5)
    for _ in range(2):
        pool.release(fill(pool, prompt(1)))
    pool.take_events()
    pool.allocate(4)
    assert [event.block_hashes for event in pool.take_events() if isinstance(event, BlockRemoved)] == [
        [announced(prompt(1).hashes[0])]
    ] * 2
    assert not pool.table()


def test_leaves_are_evicted_before_what_leads_to_them() -> None:
    pool = pool_of(4)
    chain = prompt(1, 2, 3, rest=0)
    pool.release(fill(pool, chain))
    pool.take_events()
    pool.allocate(2)
    removed = [event.block_hashes[0] for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert removed == [announced(block_hash) for block_hash in (chain.hashes[2], chain.hashes[1])]


def test_the_prompt_that_was_used_last_is_evicted_last() -> None:
    pool = pool_of(5)
    old, new = prompt(1, 2, rest=0), prompt(3, 4, rest=0)
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    hit = pool.find(prompt(1, 2))
    pool.hold(hit)
    pool.release(hit)
    pool.allocate(2)
    assert set(pool.table()) == {announced(block_hash) for block_hash in old.hashes}


def test_a_held_block_is_not_evicted() -> None:
    pool = pool_of(4)
    chain = prompt(1, rest=0)
    pool.release(fill(pool, chain))
    pool.hold(pool.find(prompt(1)))
    pool.allocate(2)
    assert list(pool.table()) == [announced(chain.hashes[0])]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)


@pytest.mark.parametrize(("unhashed_first", "evicted"), [(True, 0), (False, 1)])
def test_a_block_without_a_hash_is_reused_first_in_newer_versions(unhashed_first: bool, evicted: int) -> None:
    pool = pool_of(4, unhashed_first=unhashed_first)
    pool.release(fill(pool, prompt(1, rest=0)))
    pool.release(fill(pool, prompt(2)))
    pool.take_events()
    pool.allocate(1)
    assert len(pool.take_events()) == evicted


def test_a_store_names_the_block_before_it() -> None:
    pool = pool_of(9)
    chain = prompt(1, 2, 3)
    blocks = pool.allocate(4)
    pool.store(chain, blocks, 0, 1)
    pool.store(chain, blocks, 1, 3)
    first, second = pool.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.parent_block_hash is None
    assert second.parent_block_hash == first.block_hashes[0]
    assert second.token_ids == chain.tokens[4:12]


def test_a_reset_is_refused_while_a_block_is_held() -> None:
    pool = pool_of(9)
    blocks = fill(pool, prompt(1))
    pool.take_events()
    assert not pool.reset()
    assert not pool.take_events()
    pool.release(blocks)
    assert pool.reset()
    assert not pool.table()
    assert not pool.find(prompt(1))
    assert [type(event) for event in pool.take_events()] == [AllBlocksCleared]
