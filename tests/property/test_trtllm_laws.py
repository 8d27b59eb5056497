"""Laws of the TensorRT-LLM dialect: anything that it is sent, and caches that tell of themselves."""

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from index.digests import index_digest
from relays.engine import EngineRank
from relays.engine_events import EngineEvent, Moved
from relays.pulled import PulledSequence
from relays.trtllm import Source, decode_event, decode_payload, split_drain
from relays.trtllm_hashes import count_named, v1_names
from schemas.errors import BadInput
from schemas.profiles import TIERS, Profile
from tests.support.coroutines import immediate
from tests.support.engines import HOLDER
from tests.support.mutations import broken
from tests.support.replayed import Row, memory_store, tell
from tests.support.stories import configured, stories
from tests.support.trtllm_engine import TreeEngine
from tests.support.trtllm_events import body, known

MESSAGES = 100_000

SAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "trtllm" / "samples.jsonl").read_text().splitlines()
]
EVENTS: list[dict[str, Any]] = [event for row in SAMPLES for event in row.get("body", ())]
BATCHES: list[list[Any]] = [row["decoded"] for row in SAMPLES if "decoded" in row]
SOURCES = [
    Source(block_size=4),
    Source(block_size=0),
    Source(block_size=4, check_hashes=False),
    Source(block_size=2, adapters={"1": "a"}),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["stored", "removed", "updated", "created", "v2_sha256", "ab" * 32, "BlockStored", "GPU"])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["type", "data", "event_id", "tokens"]), inner, max_size=4
        )
    ),
    max_leaves=30,
)
packable = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5) | st.binary(max_size=9)
)


def read_all(data: bytes, source: Source) -> None:
    """Read a body as the poller does, each event to its end; every event is concluded or refused once."""
    drained, rejects = split_drain(data)
    for item in drained:
        decoded = decode_event(item.event_id, item.payload, source)
        assert decoded.sequence == item.event_id
        assert decoded.rank in (None, item.rank)
        assert len(decoded.rejects) <= 1
        assert not (decoded.rejects and decoded.events)
    assert all(reject.detail for reject in rejects)


@given(st.sampled_from(SOURCES), st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
@example(SOURCES[0], b"[" * 100_000)
@example(SOURCES[0], b'[{"event_id":1,"data":{"type":"removed","block_hashes":[' + b"[" * 5000 + b"]" * 5000 + b"]}}]")
@example(SOURCES[0], b'[{"event_id":1e3,"data":{"type":"\\ud800"}}]')
@settings(max_examples=500, deadline=None)
def test_any_body_is_read_or_bad_input(source: Source, data: bytes) -> None:
    """Whatever a server answers is a list of events, or refused as a whole."""
    try:
        read_all(data, source)
    except BadInput:
        return


def test_damaged_bodies_are_read_or_bad_input() -> None:
    """Bits, lengths and ends of answers are changed, 100,000 times; most are refused, and some can be read."""
    random = Random(20261129)
    payloads = [json.dumps([event, event]).encode() for event in EVENTS]
    refused = 0
    for number in range(MESSAGES):
        try:
            read_all(broken(payloads, random), SOURCES[number % len(SOURCES)])
        except BadInput:
            refused += 1
    assert MESSAGES // 10 < refused < MESSAGES * 9 // 10


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Return the ways to every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, inner in items for way in [(key,), *((key, *rest) for rest in paths(inner))]]


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """Return the value with one inside replaced."""
    if not way:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[way[0]] = replaced(copy[way[0]], way[1:], new)
    return copy


@given(st.sampled_from(SOURCES), st.sampled_from(EVENTS), values, st.data())
@settings(max_examples=500, deadline=None)
def test_any_value_in_an_event_is_concluded_or_refused(
    source: Source, event: dict[str, Any], value: Any, data: st.DataObject
) -> None:
    """An event with any value in it replaced by anything is concluded or refused, and what is concluded is applied."""
    damaged = replaced(event, data.draw(st.sampled_from(paths(event))), value)
    read_all(json.dumps([damaged]).encode(), source)
    rank = EngineRank(known(), HOLDER, 1)
    for item in split_drain(json.dumps([event, damaged]).encode())[0]:
        rank.take(item.event_id, item.payload)
    list(rank.speak())


@given(st.sampled_from(SOURCES), st.sampled_from(BATCHES), values | packable, st.data())
@settings(max_examples=500, deadline=None)
def test_any_value_in_a_batch_is_concluded_or_refused(
    source: Source, batch: list[Any], value: Any, data: st.DataObject
) -> None:
    """A published batch with any value in it replaced is refused, or each of its events is concluded or refused."""
    damaged = replaced(batch, data.draw(st.sampled_from(paths(batch))), value)
    try:
        payload = msgspec.msgpack.encode(damaged)
    except OverflowError:
        return  # an integer that msgpack does not have
    try:
        decoded = decode_payload(0, payload, source)
    except BadInput:
        return
    rank = EngineRank(known(transport="zmq"), HOLDER, 1)
    rank.mirror.apply(decoded.events)
    list(rank.speak())


@given(st.sampled_from(SOURCES), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_published_batch_or_bad_input(source: Source, data: bytes) -> None:
    """Whatever comes over ZMQ decodes or raises BadInput."""
    try:
        decode_payload(0, data, source)
    except BadInput:
        return


@pytest.mark.parametrize(
    ("profile", "engine"),
    [
        (known(), {}),
        (known(), {"windows": (4096, 256)}),
        (known(), {"cascade": False}),  # an engine that lists everything, and a profile that expects it not to
        (known(cascade=False), {"cascade": False}),
    ],
    ids=["cascade", "windows", "listed, expected not to be", "listed"],
)
@given(st.integers(0, 1 << 30), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_the_mirror_is_the_engines_cache(profile: Profile, engine: dict[str, Any], seed: int, steps: int) -> None:
    """After every drain of a tree that stores, moves and drops, the mirror holds its whole blocks in their tiers."""
    tree, rank, sequence = TreeEngine(seed, **engine), EngineRank(profile, HOLDER, 1), PulledSequence()
    store = memory_store()
    for _ in range(steps):
        tree.act()
        for item in split_drain(body(tree.drain()))[0]:
            heard = sequence.take(item.event_id, item.window, created=item.created)
            assert heard.ended is None
            rank.learn_windows(sequence.windows)
            if heard.applies:
                rank.take(item.event_id, item.payload)
        tiers = [pair.tier for pair in rank.mirror.profile.pairs]
        held = {place: tiers[bits.bit_length() - 1] for place, bits in rank.mirror.resident()}
        assert held == tree.resident("m")
        assert all(bits.bit_count() == 1 for _, bits in rank.mirror.resident())
        tell(store, list(rank.speak()))
        assert immediate(store.digest("m", HOLDER)) == index_digest(rank.mirror.resident())
    assert rank.mirror.profile.upper_bound == (len(sequence.windows) > 1)
    assert rank.mirror.blocks == len(tree.resident("m"))  # nothing is kept that the engine dropped


CASCADING = [
    configured(cascade=True),
    configured(cascade=True, removal="one_for_all_tiers"),
    configured(cascade=True, hash_only_stores=True),
]


@given(st.sampled_from(CASCADING), stories(), st.data())
@settings(max_examples=200, deadline=None)
def test_the_index_hears_of_moves_and_cascades(
    profile: Profile, story: list[list[EngineEvent]], data: st.DataObject
) -> None:
    """After any events, moves between any tiers among them, the store's digest equals the mirror's."""
    row, store = Row(profile), memory_store()
    tiers = st.sampled_from([*TIERS[:1], *TIERS])
    for batch in story:
        row.apply(batch)
        held = [name for _, name in row.mirror.engine_table("gpu")]
        if held:
            name, before, after = data.draw(st.sampled_from(held)), data.draw(tiers), data.draw(tiers)
            row.apply([Moved(hashes=(name,), before=before, tier=after, group=data.draw(st.integers(0, 3)))])
        if data.draw(st.booleans(), label="drain"):
            tell(store, row.speak())
            assert immediate(store.digest("m", HOLDER)) == row.digest
    tell(store, row.speak())
    assert immediate(store.digest("m", HOLDER)) == row.digest


names = st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=12)


@given(names, st.integers(1, 4), st.none() | st.integers(0, (1 << 64) - 1), st.integers(0, 11))
def test_a_chain_bears_its_own_names_and_no_others(
    tokens: list[int], size: int, adapter: int | None, changed: int
) -> None:
    """All of a chain's names count; with a token changed, only those of the blocks before it; with an adapter, none."""
    chain = list(v1_names(tokens, size, adapter_id=adapter))
    count = count_named(chain, tokens, size, None, algorithm="v1_block_key", adapter_id=adapter)
    assert count == len(chain) == len(tokens) // size
    if adapter is not None:
        assert count_named(chain, tokens, size, None, algorithm="v1_block_key") == 0
    elif changed < len(chain) * size:
        other = [*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]]
        assert count_named(chain, other, size, None, algorithm="v1_block_key") == changed // size
