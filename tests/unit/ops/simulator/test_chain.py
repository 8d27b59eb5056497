"""Hashes of the simulated engine."""

from ops.simulator.chain import DEFAULT_SEED, Adapter, Chain, HashScheme, announced, root_of
from relays.engine_events import Stored
from relays.vllm_hashes import FirstBlockCheck

TOKENS = tuple(range(100, 108))
TAGGED = HashScheme(root_of("0"), 4, tagged_keys=True)
PLAIN = HashScheme(root_of("0"), 4, tagged_keys=False)


def test_the_root_is_vllms_for_seed_zero() -> None:
    root = root_of("0").hex()
    assert root.startswith("1973e238")
    assert root.endswith("14aa7c")


def test_the_first_block_has_the_hash_that_the_relays_recompute() -> None:
    check = FirstBlockCheck("sha256", "0", 64)
    chain = Chain(PLAIN, TOKENS)
    assert announced(chain.hashes[0]) == check.first_block(Stored(hashes=(0,), tokens=TOKENS, block_size=4))


def test_an_adapters_first_block_has_the_hash_that_the_relays_recompute() -> None:
    check = FirstBlockCheck("sha256", DEFAULT_SEED, 64)
    scheme = HashScheme(root_of(DEFAULT_SEED), 4, tagged_keys=False)
    chain = Chain(scheme, TOKENS, adapter=Adapter("french", 1, "loras/french"))
    stored = Stored(hashes=(0,), tokens=TOKENS, block_size=4, adapter="french")
    assert announced(chain.hashes[0]) == check.first_block(stored)


def test_generated_tokens_extend_the_chain_as_prompt_tokens_do() -> None:
    grown = Chain(TAGGED, TOKENS[:5])
    for token in TOKENS[5:]:
        grown.append(token)
    assert grown.hashes == Chain(TAGGED, TOKENS).hashes


def test_a_salt_changes_every_block_and_is_announced_in_the_first() -> None:
    salted, plain = Chain(TAGGED, TOKENS, salt="s"), Chain(TAGGED, TOKENS)
    assert not set(salted.hashes) & set(plain.hashes)
    assert salted.announced_keys(0, 2) == [("s",), None]


def test_an_adapter_is_announced_in_every_block_before_the_salt() -> None:
    chain = Chain(TAGGED, TOKENS, adapter=Adapter("french", 1, "p"), salt="s")
    assert chain.announced_keys(0, 2) == [("french", "s"), ("french",)]


def test_an_adapters_path_changes_the_hash_only_where_keys_are_tagged() -> None:
    def first(scheme: HashScheme, path: str) -> bytes:
        return Chain(scheme, TOKENS, adapter=Adapter("french", 1, path)).hashes[0]

    assert first(TAGGED, "a") != first(TAGGED, "b")
    assert first(PLAIN, "a") == first(PLAIN, "b")
