"""SGLang's messages through decoder and mirror: pages, pairs, namespaces and hybrid models."""

import pytest

from index.hashing import Namespace, chain_hashes, pack_tokens, root_hash
from tests.support.payloads import array_stored, map_removed
from tests.support.sglang_engine import PROMPT, Told, stored
from tests.support.sglang_frames import PAIRS, map_stored


async def test_pairs_are_found_by_single_tokens() -> None:
    """A prompt of n tokens has n - 1 pairs, and the last token of a page is part of its identity."""
    engine = Told(block_size=4, drafting="eagle")
    await engine.say(map_stored(token_ids=PAIRS))
    assert (await engine.ask([1, 2, 3, 4, 5])).tokens == 4
    assert (await engine.ask([1, 2, 3, 4])).tokens == 0
    assert (await engine.ask([1, 2, 3, 4, 6])).tokens == 0
    assert (await engine.ask([1, 2, 3, 4, 5, 9], whole=False)).tokens == 4


async def test_pairs_are_known_by_their_shape() -> None:
    """Without a word from the operator the first pairs make the profile one of pairs."""
    engine = Told()
    await engine.say(array_stored([10], None, PAIRS, 4, None, "GPU"))
    assert engine.index.engine.mirror.profile.drafting == "pairs"
    assert (await engine.ask([1, 2, 3, 4, 5, 6])).tokens == 4


@pytest.mark.parametrize("size", [1, 16])
async def test_the_last_token_is_always_computed(size: int) -> None:
    """A hit is cut to whole pages and leaves at least one token of the prompt."""
    engine = Told()
    tokens = list(range(100, 132))
    names = list(range(32 // size))
    await engine.say(map_stored(block_hashes=names, token_ids=tokens, block_size=size))
    assert (await engine.ask(tokens, whole=False)).tokens == 32 - size
    assert (await engine.ask([*tokens, 1], whole=False)).tokens == 32
    assert (await engine.ask(tokens[:17], whole=False)).tokens == 16


async def test_namespaces_are_apart() -> None:
    """Salt and adapter are part of a page's identity; each is found under its own name only."""
    engine = Told()
    await engine.say(stored(1, cache_salt="a"))
    await engine.say(map_stored(block_hashes=[99], token_ids=PROMPT[:4], lora_name="sql"))
    assert (await engine.ask()).tokens == 0
    assert (await engine.ask(salt="a")).tokens == 4
    assert (await engine.ask(adapter="sql")).tokens == 4
    assert (await engine.ask(salt="a", adapter="sql")).tokens == 0


async def test_a_salted_chain_of_0_5_18_goes_on_without_its_salt() -> None:
    """Only root stores carry the map there; what hangs below is of the same namespace."""
    engine = Told("0.5.18")
    await engine.say(array_stored([10], None, PROMPT[:4], 4, None, "GPU", {"cache_salt": "a"}))
    await engine.say(array_stored([20], 10, PROMPT[4:8], 4, None, "GPU"))
    assert (await engine.ask(salt="a")).tokens == 8
    assert (await engine.ask()).tokens == 0


async def test_two_names_of_one_page_are_ambiguous_and_cold() -> None:
    """The dynamo format hashes an extra key that no field tells: what cannot be told apart earns nothing."""
    engine = Told()
    await engine.say(stored(1))
    await engine.say(map_stored(block_hashes=[77], token_ids=PROMPT[:4]))
    assert (await engine.ask()).tokens == 0
    await engine.say(map_removed(block_hashes=[77]))
    assert (await engine.ask()).tokens == 4


async def test_a_hidden_extra_key_is_said_with_every_credit() -> None:
    """No version tells extra keys, so an answer that credits anything says what it cannot know."""
    engine = Told()
    await engine.say(stored(1))
    assert (await engine.ask()).marks == ("extra_keys_not_in_events",)


async def test_a_hybrid_model_answers_with_an_upper_bound() -> None:
    """Window and state layers limit the engine's hits unseen, so the answer says that it may be too high."""
    engine = Told(unreported=("state",))
    await engine.say(stored(1, 2))
    reach = await engine.ask()
    assert (reach.tokens, reach.upper_bound) == (8, True)
    cold = Told(unreported=("window",), upper_bound_policy="gone")
    await cold.say(stored(1, 2))
    assert (await cold.ask()).tokens == 0


def test_pages_of_pairs_have_other_names_than_pages_of_tokens() -> None:
    """The namespace tells them apart, so an engine that drafts never answers for one that does not."""
    plain, paired = (
        chain_hashes(root_hash(Namespace("m", 4, pairs)), pack_tokens([1, 2, 3, 4, 5]), 4, pairs=pairs)
        for pairs in (False, True)
    )
    assert plain != paired
