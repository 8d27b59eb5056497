"""The TensorRT-LLM decoder: drained lists and ZMQ batches in, engine events out, and what earns nothing."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relays.decoders import decoder_of
from relays.dialects import EngineSettings, profile_for
from relays.engine import EngineRank
from relays.engine_events import Cleared, Decoded, EngineEvent, Moved, RejectReason, Removed, Stored
from relays.process import RelayConfig, profile_of, spread_ranks
from relays.trtllm import MAX_DRAIN_BYTES, MAX_RANK, Source, decode_event, decode_payload, split_drain
from relays.trtllm_hashes import salt_ids, v1_names
from relays.trtllm_poller import events_url
from schemas.errors import ConfigError, FrameError
from schemas.profiles import Rank
from tests.support.engines import HOLDER, chain, resident
from tests.support.trtllm_events import (
    SIZE,
    SOURCE,
    block,
    blocks,
    body,
    concluded,
    created,
    event,
    known,
    moved,
    removed,
    stored,
)

SAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "trtllm" / "samples.jsonl").read_text().splitlines()
]
HTTP = [row for row in SAMPLES if row["transport"] == "http"]
ZMQ = [row for row in SAMPLES if row["transport"] != "http"]
A, B, PARTIAL = 1129369155989302, 15923378101821673488, 4926926678720399332
TOKENS = list(range(100, 110))  # two blocks and a half
DIGEST = "c75f53b7dcdd1d945d950938acaea7568b6f739d76907811740b12c6e5091cf2"


def told(names: list[int], first: int = 100, parent: int | None = None, **fields: Any) -> Stored:
    tokens = list(range(first, first + SIZE * len(names)))
    return Stored(hashes=tuple(names), parent=parent, tokens=tokens, block_size=SIZE, **fields)


def refused(data: Any, source: Source = SOURCE, **fields: Any) -> RejectReason:
    decoded = decode_event(0, msgspec.json.encode(event(data, **fields)), source)
    assert not decoded.events
    (reject,) = decoded.rejects
    return reject.reason


def unknown(events: list[EngineEvent]) -> list[int]:
    """Return how many blocks of each store have no known namespace."""
    return [len(e.hashes) for e in events if isinstance(e, Stored) and not e.namespace_known]


# ---- the samples


EXPECTED: dict[str, list[EngineEvent]] = {
    "start-up with": [],
    "V1 manager, tokens_per_block=4": [told([A, B]), told([A, B])],  # once a window
    "offload of one block": [Moved(hashes=(B,), before="gpu", tier="host")],
    "onboard back": [Moved(hashes=(B,), before="host", tier="gpu")],  # and a priority, which says nothing
    "removal of the partial": [Removed(hashes=(PARTIAL,)), Removed(hashes=(B, PARTIAL))],
    "nothing new": [],
    "attention data parallelism": [told([A]), told([A])],
    "older releases": [told([A, B])],
    "V2 manager with kv_cache_event_hash_algo=v2_sha256:": [  # placeholders: no tokens give them
        Stored(
            hashes=tuple(
                bytes.fromhex(name)
                for name in (
                    "54addd58aade5db36fb46654d9c3b22ae89e6354873ebefd724cb3d0341ab4a1",
                    "e1d49ba1260ddb76b273b89fef5105362d74cb5eadf2c8872774019aac40f456",
                )
            ),
            block_size=SIZE,
            namespace_known=False,
        )
    ],
    "V2 manager with v2_sha256_64": [
        Stored(hashes=(6101776443050450355,), block_size=SIZE, namespace_known=False),
        Removed(hashes=(6101776443050450355,)),
    ],
}


@pytest.mark.parametrize("row", HTTP, ids=lambda row: row["note"][:40])
def test_a_drained_list_says_what_the_table_says(row: Any) -> None:
    """Every sample's body decodes event by event, in its order and without a refusal."""
    drained, rejects = split_drain(msgspec.json.encode(row["body"]))
    decodeds = [decode_event(item.event_id, item.payload, SOURCE) for item in drained]
    assert not rejects
    assert not any(decoded.rejects for decoded in decodeds)
    (expected,) = [events for note, events in EXPECTED.items() if row["note"].startswith(note)]
    assert [e for decoded in decodeds for e in decoded.events] == expected
    assert [decoded.sequence for decoded in decodeds] == [e["event_id"] for e in row["body"]]
    assert [item.window for item in drained] == [e["window_size"] for e in row["body"]]
    assert [decoded.rank for decoded in decodeds] == [e.get("attention_dp_rank", 0) for e in row["body"]]


@pytest.mark.parametrize("row", ZMQ, ids=lambda row: row["note"])
def test_a_published_batch_says_what_its_sample_says(row: Any) -> None:
    """The ZMQ samples decode; their names are placeholders, so their blocks have no known namespace."""
    payload = base64.b64decode(row["frames"][2])
    decoded = decode_payload(0, payload, SOURCE)
    stamp, (told_event,), rank = row["decoded"]
    assert (decoded.time_s, decoded.rank, decoded.rejects) == (stamp, rank, ())
    names = tuple(told_event["block_hashes"])
    stored_blocks = Stored(hashes=names, block_size=SIZE, namespace_known=False)
    assert decoded.events == ((stored_blocks if "token_ids" in told_event else Removed(hashes=names)),)
    for end in range(len(payload)):
        with pytest.raises(FrameError):
            decode_payload(0, payload[:end], SOURCE)
    with pytest.raises(FrameError):
        decode_payload(0, payload + b"\xc0", SOURCE)


# ---- drained lists


def test_a_body_that_is_no_list_is_refused_whole() -> None:
    """Cut off anywhere, or something else than a list, a body raises FrameError."""
    whole = body([event(stored(blocks(TOKENS)))])
    assert len(split_drain(whole)[0]) == 1
    for end in range(len(whole)):
        with pytest.raises(FrameError):
            split_drain(whole[:end])
    for other in (b"{}", b"null", b"3", whole + b"]", b"\xff"):
        with pytest.raises(FrameError, match="batch_malformed"):
            split_drain(other)


def test_a_body_past_its_bounds_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and events are bounded."""
    with pytest.raises(FrameError, match="payload_bytes"):
        split_drain(bytes(MAX_DRAIN_BYTES + 1))
    with pytest.raises(FrameError, match="event_count"):
        split_drain(b"[" + b"{}," * 100_000 + b"{}]")


def test_ranks_come_with_their_events() -> None:
    """An absent attention_dp_rank is rank 0; the order inside each rank is the list's."""
    events = [event(created(), 0), event(created(), 5, attention_dp_rank=3), event(created(), 1, attention_dp_rank=0)]
    drained, rejects = split_drain(body(events))
    assert [(item.rank, item.event_id, item.created) for item in drained] == [(0, 0, True), (3, 5, True), (0, 1, True)]
    assert not rejects


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"event_id": 1},
        {"event_id": "1", "data": created()},
        {"event_id": 1.0, "data": created()},
        {"event_id": -1, "data": created()},
        {"event_id": 1 << 60, "data": created()},
        {"event_id": 1, "data": created(), "attention_dp_rank": MAX_RANK + 1},
        {"event_id": 1, "data": created(), "attention_dp_rank": -1},
        {"event_id": 1, "data": created(), "window_size": "large"},
        7,
    ],
)
def test_an_event_whose_place_cannot_be_read_costs_itself(broken: Any) -> None:
    """The others of its list are taken; the missing number shows as a gap later."""
    drained, rejects = split_drain(body([broken, event(created(), 2)]))
    assert [item.event_id for item in drained] == [2]
    assert [reject.position for reject in rejects] == [0]


# ---- stores


def test_a_chain_is_one_store_without_its_partial_block() -> None:
    """A block with fewer tokens than tokens_per_block is announced like a full one and is not credited."""
    assert concluded(stored(blocks(TOKENS))) == [told([A, B])]
    assert concluded(stored(blocks([1, 2, 3]))) == []
    assert concluded(stored([])) == []


def test_a_continued_chain_names_its_parent() -> None:
    """The parent's name says where the first block stands."""
    assert concluded(stored(blocks(TOKENS[4:], A), A)) == [told([B], first=104, parent=A)]


def test_a_chain_in_several_levels_is_several_stores() -> None:
    """Each tier has its own, in the chain's order; a level that nobody knows is `other`."""
    levels = [0, 1, 1, 2, 7]
    tokens = list(range(100, 120))
    told_blocks = [{**part, "cache_level": level} for part, level in zip(blocks(tokens), levels, strict=True)]
    names = list(v1_names(tokens, SIZE))
    assert concluded(stored(told_blocks)) == [
        told(names[:1]),
        told(names[1:3], first=104, parent=names[0], tier="host"),
        told(names[3:4], first=112, parent=names[2], tier="disk"),
        told(names[4:], first=116, parent=names[3], tier="other"),
    ]


def test_names_are_exact_above_two_to_the_53() -> None:
    """Neighbouring 64-bit names stay apart, and a digest of 64 hexadecimal digits stays whole."""
    assert concluded(removed(B, B + 1, -1)) == [Removed(hashes=(B, B + 1, (1 << 64) - 1))]
    assert concluded(removed(DIGEST)) == [Removed(hashes=(bytes.fromhex(DIGEST),))]


@pytest.mark.parametrize(
    "name", [1 << 64, -(1 << 63) - 1, "", "12", DIGEST[:-1] + "g", DIGEST + "00", "0x" + DIGEST[2:]]
)
def test_a_name_that_is_none_refuses_its_event(name: Any) -> None:
    """Neither 64 bits nor 64 digits: the event cannot be used."""
    assert refused(removed(name)) is RejectReason.HASH
    assert refused(stored([block(name, [1, 2, 3, 4])])) is RejectReason.HASH
    assert refused(moved(name, 0, 1)) is RejectReason.HASH


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (stored([block(1, [1, 2, 3, 4, 5])]), RejectReason.BLOCK_SIZE),
        (stored([block(1, [1, 2]), block(2, [1, 2, 3, 4])]), RejectReason.TOKEN_COUNT),
        (stored([block(1, [1, 2, 3, -4])]), RejectReason.TOKEN_RANGE),
        (stored([block(1, [1, 2, 3, 1 << 31])]), RejectReason.TOKEN_RANGE),
        (stored([block(1, [1, 2, 3, None])]), RejectReason.MALFORMED),  # type: ignore[list-item]  # it is wrong
        (stored([{"tokens": []}]), RejectReason.MALFORMED),
        ({"type": "stored", "blocks": []}, RejectReason.MALFORMED),
        ({"type": "removed", "block_hashes": [1.5e19]}, RejectReason.MALFORMED),
        ({"type": "updated", "block_hash": 1, "cache_level": 1}, RejectReason.MALFORMED),
        ({"type": "evicted"}, RejectReason.UNKNOWN_EVENT),
        ({}, RejectReason.MALFORMED),
    ],
)
def test_an_event_that_cannot_be_used_is_refused_with_its_reason(data: Any, reason: RejectReason) -> None:
    """Each refusal names why."""
    assert refused(data) is reason


def test_a_group_beyond_all_models_is_refused() -> None:
    """layer_group_id is bounded like every engine's group."""
    assert concluded(removed(1), layer_group_id=3) == [Removed(hashes=(1,), group=3)]
    assert refused(removed(1), layer_group_id=64) is RejectReason.GROUP
    assert refused(removed(1), layer_group_id=-1) is RejectReason.GROUP


# ---- what earns nothing


def test_a_hidden_adapter_is_found_by_its_names() -> None:
    """The JSON has no lora_id; names that the plain tokens do not give belong to a namespace that nobody named."""
    names = list(v1_names(range(100, 108), SIZE, adapter_id=1))
    hidden = [block(name, range(100 + n * SIZE, 104 + n * SIZE)) for n, name in enumerate(names)]
    assert concluded(stored(hidden)) == [Stored(hashes=tuple(names), block_size=SIZE, namespace_known=False)]


def test_from_the_first_wrong_name_on_a_chain_earns_nothing() -> None:
    """What stands before it is credited."""
    parts = blocks(list(range(100, 116)))
    parts[2]["block_hash"] += 1
    events = concluded(stored(parts))
    assert events[0] == told([A, B])
    assert unknown(events) == [2]


def test_a_parent_that_the_engine_left_out_is_found_too() -> None:
    """A block that calls itself the first of a prompt, and is not (#3543), has another name than a first block."""
    assert unknown(concluded(stored(blocks(TOKENS[4:8], A)))) == [1]


def test_a_told_salt_is_part_of_the_namespace() -> None:
    """Later releases say the salt; the names of either manager agree with it, and a wrong salt is noticed."""
    for number in salt_ids("tenant"):
        names = list(v1_names(range(100, 108), SIZE, salt_id=number))
        parts = [block(n, range(100 + k * 4, 104 + k * 4), cache_salt="tenant") for k, n in enumerate(names)]
        assert concluded(stored(parts)) == [told(names, salt="tenant")]
        assert concluded(stored(parts[1:], names[0])) == [told(names[1:], first=104, parent=names[0])]
        for part in parts:
            part["cache_salt"] = "other"
        assert unknown(concluded(stored(parts))) == [2]


def test_a_salt_that_is_a_number_cannot_be_named() -> None:
    """Only its text could be part of a prompt's namespace."""
    assert unknown(concluded(stored(blocks(TOKENS[:8], cache_salt=5)))) == [2]


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_keys": [{"type": "mm_key", "hash": DIGEST, "start_offset": 0}]},
        {"tokens": [{"token_id": t, "token_extra_id": 9} for t in range(104, 108)]},
        {"tokens": [{"token_id": DIGEST} for _ in range(4)]},
    ],
    ids=["an image", "prompt tuning", "digests for tokens"],
)
def test_what_a_prompts_tokens_cannot_say_earns_nothing(fields: Any) -> None:
    """From a block on with media or extra ids nothing is credited; what stands before it is."""
    parts = blocks(list(range(100, 112)))
    parts[1].update(fields)
    events = concluded(stored(parts))
    assert events[0] == told([A])
    assert unknown(events) == [2]


def test_a_shown_adapter_is_taken_at_its_word() -> None:
    """Where a block says its lora_id nothing is hidden: null is the plain model, a number needs a name."""
    plain = [{**part, "block_hash": n + 41, "lora_id": None} for n, part in enumerate(blocks(TOKENS[:8]))]
    assert concluded(stored(plain)) == [told([41, 42])]
    adapted = [{**part, "lora_id": 7} for part in plain]
    assert unknown(concluded(stored(adapted))) == [2]
    named = Source(block_size=SIZE, adapters={"7": "alpha"})
    assert concluded(stored(adapted), named) == [told([41, 42], adapter="alpha")]


def test_names_that_are_not_checked_are_believed() -> None:
    """With `check_hashes` off, what events hide is taken for the plain namespace."""
    believing = Source(block_size=SIZE, check_hashes=False)
    assert concluded(stored([block(5, [1, 2, 3, 4])]), believing) == [told([5], first=1)]


# ---- the rest of the HTTP events


def test_a_level_that_changes_is_a_move() -> None:
    """Offloading and onboarding are one step each; a priority, or a level that stays, is nothing."""
    assert concluded(moved(A, 0, 1)) == [Moved(hashes=(A,), before="gpu", tier="host")]
    assert concluded(moved(A, 1, 2), layer_group_id=1) == [Moved(hashes=(A,), before="host", tier="disk", group=1)]
    assert concluded(moved(A, 1, 1)) == []
    assert concluded({"type": "updated", "block_hash": A, "priority": {"old_value": 1, "new_value": 2}}) == []
    assert concluded({"type": "updated", "block_hash": A, "cache_level": None, "priority": None}) == []


def test_a_pool_that_is_made_is_no_block() -> None:
    """`created` carries nothing."""
    assert concluded(created()) == []


def test_keys_of_a_later_release_are_passed_over() -> None:
    """Unknown keys at any level change nothing."""
    parts = [{**part, "later": 1} for part in blocks(TOKENS)]
    assert concluded({**stored(parts), "later": {}}, later=[]) == [told([A, B])]


# ---- ZMQ


def batch(*events: dict[str, Any]) -> Decoded:
    return decode_payload(3, msgspec.msgpack.encode([1.5, list(events), 0]), SOURCE)


def published(names: list[int], tokens: list[int | str], **fields: Any) -> dict[str, Any]:
    always = {"parent_block_hash": None, "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    return {"type": "BlockStored", "block_hashes": names, "token_ids": tokens, **always, **fields}


def low64(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[-8:], "big", signed=True)


def first_name(tokens: list[int], scope: bytes = b"\0") -> int:
    return low64(hashlib.sha256(scope).digest(), *(token.to_bytes(4, "little") for token in tokens))


def test_published_blocks_are_known_by_their_first_name() -> None:
    """A prompt's first block must bear the name of its tokens; what continues hangs on its parent."""
    name = first_name([1, 2, 3, 4])
    decoded = batch(published([name, 7], [1, 2, 3, 4, 5, 6, 7, 8]), published([8], [9, 9, 9, 9], parent_block_hash=-7))
    pattern = name & ((1 << 64) - 1)
    assert decoded.events == (
        Stored(hashes=(pattern, 7), tokens=[1, 2, 3, 4, 5, 6, 7, 8], block_size=SIZE),
        Stored(hashes=(8,), parent=(1 << 64) - 7, tokens=[9, 9, 9, 9], block_size=SIZE),
    )
    assert unknown(list(batch(published([5], [1, 2, 3, 4])).events)) == [1]  # a salt, which is never told


def test_a_published_adapter_needs_a_name_and_is_checked() -> None:
    """Its number is in the root of the names."""
    name = first_name([1, 2, 3, 4], b"\x01" + (7).to_bytes(8, "little"))
    source = Source(block_size=SIZE, adapters={"7": "alpha"})
    payload = msgspec.msgpack.encode([1.5, [published([name], [1, 2, 3, 4], lora_id=7)], 0])
    (event_of_alpha,) = decode_payload(0, payload, source).events
    assert isinstance(event_of_alpha, Stored)
    assert (event_of_alpha.adapter, event_of_alpha.namespace_known) == ("alpha", True)
    assert unknown(list(decode_payload(0, payload, SOURCE).events)) == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [1, 2, 3, 4, 5, DIGEST, 6, 7, 8, 9, 10, 11]},
        {"mm_keys": [[], [{"type": "mm_key", "hash": "x"}], []]},
    ],
    ids=["digests for tokens", "media keys"],
)
def test_a_published_image_ends_what_is_known(fields: Any) -> None:
    """What stands before it is credited."""
    name = first_name([1, 2, 3, 4])
    decoded = batch({**published([name, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), **fields})
    assert decoded.events[0] == Stored(hashes=(name & ((1 << 64) - 1),), tokens=[1, 2, 3, 4], block_size=SIZE)
    assert unknown(list(decoded.events)) == [2]


def test_published_removals_and_clears() -> None:
    """Every block is listed; a clear, which no release sends yet, is one."""
    decoded = batch(
        {"type": "BlockRemoved", "block_hashes": [-1, 5], "medium": "GPU"},
        {"type": "BlockRemoved", "block_hashes": [6], "medium": "TAPE", "group_idx": 2},
        {"type": "AllBlocksCleared"},
    )
    assert decoded.events == (
        Removed(hashes=((1 << 64) - 1, 5)),
        Removed(hashes=(6,), tier="other", group=2),
        Cleared(),
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"type": "BlockSwapped"}, RejectReason.UNKNOWN_EVENT),
        (["BlockRemoved", [1]], RejectReason.MALFORMED),  # only maps here
        ({"type": "BlockRemoved", "block_hashes": [b"12345678"]}, RejectReason.MALFORMED),
        (published([1, 2], [1, 2, 3, 4]), RejectReason.TOKEN_COUNT),
        (published([1], [], block_size=0), RejectReason.BLOCK_SIZE),
        (published([1], [1, 2, 3, -4]), RejectReason.TOKEN_RANGE),
        (published([1], [1, 2, 3, 4], group_idx=99), RejectReason.GROUP),
        (published([1], [1, 2, 3, 4], locality="REMOTE"), RejectReason.LOCALITY),
    ],
)
def test_a_published_event_that_cannot_be_used_costs_itself(wrong: Any, reason: RejectReason) -> None:
    """The others of its batch are taken."""
    decoded = batch(wrong, {"type": "BlockRemoved", "block_hashes": [5]})
    assert decoded.events == (Removed(hashes=(5,)),)
    assert [reject.reason for reject in decoded.rejects] == [reason]


def test_an_empty_published_store_is_nothing() -> None:
    """No hashes and no tokens: no event, no refusal."""
    assert batch(published([], [])) == Decoded(3, 1.5, 0, ())


# ---- what is known of the engine


def test_the_profile_has_what_the_facts_say() -> None:
    """Over HTTP: blocks of 32 tokens, one removal for all levels, cascades, no replay; over ZMQ none of these."""
    pulled = profile_for("trtllm", "m", "r", "1.2.0rc3", EngineSettings())
    assert (pulled.dialect, pulled.unit, pulled.alignment, pulled.groups) == ("trtllm", 32, 32, ())
    assert (pulled.removal, pulled.cascade, pulled.replay, pulled.tier_walk) == (
        "one_for_all_tiers",
        True,
        "none",
        "mixed",
    )
    heard = profile_for("trtllm", "m", "r", "1.2.0", EngineSettings(transport="zmq", windows=(64, 32)))
    assert (heard.dialect, heard.unit, heard.removal, heard.cascade) == ("trtllm_zmq", 0, "per_copy", False)
    assert (heard.replay, heard.window_sizes, heard.upper_bound) == ("ring", (), False)


def test_what_an_operator_says_is_in_the_profile() -> None:
    """Windows, largest first and an upper bound where there are several; cascade and the check of names."""
    said = known(windows=(256, 4096), cascade=False, check_hashes=False, adapters={"1": "a"})
    assert (said.window_sizes, said.upper_bound, said.cascade) == ((4096, 256), True, False)
    assert (said.hidden_namespaces, said.marks) == (("salt", "adapter"), ("namespaces_unchecked",))
    assert (known().hidden_namespaces, known().marks, known(windows=(64,)).upper_bound) == ((), (), False)
    with pytest.raises(ConfigError, match="windows"):
        known(windows=(0,))
    with pytest.raises(ConfigError, match="engine version"):
        profile_for("trtllm", "m", "r", "main", EngineSettings())


def test_the_profile_chooses_the_decoder() -> None:
    """A drained event for HTTP, a batch for ZMQ; `check_hashes` reaches it."""
    drained = msgspec.json.encode(event(stored([block(5, [1, 2, 3, 4])])))
    assert unknown(list(decoder_of(known())(0, drained).events)) == [1]
    assert unknown(list(decoder_of(known(check_hashes=False))(0, drained).events)) == []
    with pytest.raises(FrameError):
        decoder_of(known(transport="zmq"))(0, drained)


def config(endpoint: str, **settings: Any) -> RelayConfig:
    return RelayConfig(
        model="m",
        replica="r",
        engine="trtllm",
        version="1.2.0",
        ranks=spread_ranks(endpoint, None, 2),
        settings=EngineSettings(**settings),
    )


def test_all_ranks_are_asked_for_at_one_address() -> None:
    """Over HTTP there is one port, over ZMQ one for each rank."""
    asked = profile_of(config("http://10.0.0.7:8000"))
    assert asked.ranks == (Rank(0, "http://10.0.0.7:8000"), Rank(1, "http://10.0.0.7:8000"))
    heard = profile_of(config("tcp://10.0.0.7:5557", transport="zmq"))
    assert heard.ranks == (Rank(0, "tcp://10.0.0.7:5557"), Rank(1, "tcp://10.0.0.7:5558"))


@pytest.mark.parametrize(
    ("endpoint", "transport"), [("tcp://10.0.0.7:5557", "http"), ("http://10.0.0.7", "zmq"), ("http://", "http")]
)
def test_an_address_of_the_other_transport_stops_the_start(endpoint: str, transport: str) -> None:
    """ConfigError shows the endpoint."""
    with pytest.raises(ConfigError, match="endpoint"):
        profile_of(
            RelayConfig(
                model="m",
                replica="r",
                engine="trtllm",
                version="1.2.0",
                ranks=(Rank(0, endpoint),),
                settings=EngineSettings(transport=transport),  # type: ignore[arg-type]  # one of two texts
            )
        )


# ---- through the mirror


def engine(**settings: Any) -> EngineRank:
    return EngineRank(known(**settings), HOLDER, 1)


def take(rank: EngineRank, *datas: dict[str, Any]) -> None:
    for number, data in enumerate(datas):
        rank.take(number, msgspec.json.encode(event(data, number)))


def test_a_chain_lives_moves_and_goes() -> None:
    """Stored, offloaded, and removed by its root's name alone."""
    rank = engine()
    take(rank, created(), stored(blocks(TOKENS)), moved(B, 0, 1))
    first, second = chain(TOKENS)
    assert resident(rank.mirror) == {first: 1, second: 2}
    take(rank, removed(PARTIAL), moved(B, 1, 0))
    assert resident(rank.mirror) == {first: 1, second: 1}
    take(rank, removed(A))
    assert resident(rank.mirror) == {}


def test_without_cascade_every_block_is_listed() -> None:
    """Up to March 2026 the engine names each block that goes, wherever it is."""
    rank = engine(cascade=False)
    take(rank, stored(blocks(TOKENS)), moved(B, 0, 1), removed(A))
    assert resident(rank.mirror) == {chain(TOKENS)[1]: 2}
    take(rank, removed(B))
    assert resident(rank.mirror) == {}


@pytest.mark.parametrize("cascade", [False, True])
def test_a_chain_of_an_adapter_earns_nothing_and_neither_does_what_continues_it(cascade: bool) -> None:
    """Nor does it take the plain chain's credit away."""
    rank = engine(cascade=cascade)
    names = list(v1_names(range(100, 108), SIZE, adapter_id=1))
    hidden = [block(name, range(100 + n * SIZE, 104 + n * SIZE)) for n, name in enumerate(names)]
    take(rank, stored(hidden[:1]), stored(hidden[1:], names[0]), stored(blocks(TOKENS)))
    assert set(resident(rank.mirror)) == set(chain(TOKENS))
    assert rank.mirror.counts["namespace_unknown"] >= 1
    assert rank.mirror.ambiguous_blocks == 0


def test_the_steps_of_case_a11() -> None:
    """Level 0 is the GPU, level 1 the host; `created` and a change of priority alone change nothing."""
    part = {"block_hash": 41, "lora_id": None, "cache_level": 0, "priority": 35}
    tokens = [{"token_id": token, "token_extra_id": 0} for token in (1, 2, 3, 4)]
    (place,) = chain([1, 2, 3, 4])
    rank = engine()
    take(rank, created(100, 50), {"type": "stored", "parent_hash": None, "blocks": [{**part, "tokens": tokens}]})
    diff = {"old_value": 0, "new_value": 1}
    take(rank, {"type": "updated", "block_hash": 41, "cache_level": diff, "priority": None})
    assert resident(rank.mirror) == {place: 2}
    take(
        rank, {"type": "updated", "block_hash": 41, "cache_level": None, "priority": {"old_value": 35, "new_value": 1}}
    )
    assert resident(rank.mirror) == {place: 2}
    take(rank, moved(41, 1, 0))
    assert resident(rank.mirror) == {place: 1}


# ---- where to ask


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000/kv_cache_events"),
        ("https://engine.example/", "https://engine.example/kv_cache_events"),
        ("http://gateway:80/engines/7/kv_cache_events", "http://gateway/engines/7/kv_cache_events"),
        ("http://[::1]:8000", "http://[::1]:8000/kv_cache_events"),
    ],
)
def test_events_are_asked_for_at_the_servers_path(endpoint: str, url: str) -> None:
    """Without a path the server's own is taken; one that is given, behind a gateway say, is kept."""
    assert events_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.7:5557", "10.0.0.7:8000", "http://", "http://[::1", ""])
def test_what_is_no_http_address_stops_the_start(endpoint: str) -> None:
    """ConfigError shows what was given."""
    with pytest.raises(ConfigError, match="endpoint"):
        events_url(endpoint)
