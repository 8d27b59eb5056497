"""Each feature of the notation, in cases of our own: what the given file has only one instance of, or none."""

from typing import Any

import pytest

from tests.cases.notation import Case, parse_tokens
from tests.cases.world import run_case

Json = dict[str, Any]


async def check(*steps: Json, **profile: Any) -> None:
    """Run a case; it must answer what it wants, and have no field that is not read."""
    outcome = await run_case(Case(id="X", kind="exact", profile=profile, steps=list(steps)))
    assert outcome.failures == []
    assert outcome.unread == []


def store(*names: Any, tok: Any = "1..4", **fields: Any) -> Json:
    return {"op": "store", "h": list(names), "tok": tok, **fields}


def remove(*names: Any, **fields: Any) -> Json:
    return {"op": "remove", "h": list(names), **fields}


def said(*events: Json, sender: str = "e1", **fields: Any) -> Json:
    return {"from": sender, "ev": list(events), **fields}


def asked(tok: Any, want: Json | int, **fields: Any) -> Json:
    """Return a question; a number alone is what e1/0 has on GPU."""
    return {"ask": "match", "tok": tok, "want": {"e1/0": {"gpu": want}} if isinstance(want, int) else want, **fields}


def held(blocks: int, sender: str = "e1/0") -> Json:
    return {"ask": "stats", "want": {sender: {"blocks": blocks}}}


def test_tokens() -> None:
    """Ranges have both ends; numbers, ranges and pairs mix."""
    assert parse_tokens("1..4") == [1, 2, 3, 4]
    assert parse_tokens([7, "1..2", [8, 9]]) == [7, 1, 2, (8, 9)]


# ---- events


async def test_events_of_a_message_are_applied_in_order() -> None:
    """Stored and removed is gone, removed and stored is there."""
    await check(
        said(store("a"), remove("a")),
        asked("1..4", 0),
        said(store("a")),
        said(remove("a"), store("a")),
        asked("1..4", 4),
    )


async def test_a_store_without_tokens_is_a_copy_of_a_block_that_is_known() -> None:
    """A host copy that is named by hash alone counts, also when it comes after the GPU copy went."""
    await check(
        said(store("a")),
        said(remove("a")),
        said({"op": "store", "h": ["a"], "tier": "cpu"}),
        asked("1..4", {"e1/0": {"gpu": 0, "any": 4, "cpu": 4}}),
    )


async def test_tiers_alternate_in_any_and_not_in_gpu() -> None:
    """`gpu` ends at the first block that is elsewhere; `any` goes on, whatever tier comes next."""
    await check(
        said(store("a", "b", "c", tok="1..12"), store("b", tok="5..8", parent="a", tier="disk"), remove("b")),
        asked("1..12", {"e1/0": {"gpu": 4, "any": 12, "disk": 4}}),
        said({"op": "clear", "medium": "DISK"}),
        asked("1..12", {"e1/0": {"gpu": 4, "any": 4}}),
    )


async def test_a_picture_that_two_blocks_share_is_known_in_both() -> None:
    """A picture that goes on in the next block and another one behind it match in their order and in no other."""
    tokens = ["1..2", 99, 99, 99, 99, 99, 99]
    pictures = [{"id": "A", "at": 2, "len": 4}, {"id": "B", "at": 6, "len": 2}]
    await check(
        said(store("a", "b", tok=tokens, mm=[["A"], ["A", "B"]])),
        asked(tokens, 8, mm=pictures),
        asked(tokens, 4, mm=pictures[:1]),
        asked(tokens, 4, mm=[pictures[0], {"id": "C", "at": 6, "len": 2}]),
        asked(tokens, 0, mm=[{"id": "B", "at": 2, "len": 2}, {"id": "A", "at": 4, "len": 4}]),
        placeholders=[99],
    )


async def test_placeholders_whose_picture_is_not_told_match_nothing() -> None:
    """Blocks from a nameless picture on are cold; those before it are not."""
    await check(
        said(store("a", "b", tok=["1..4", 99, 99, 99, 99])),
        said(store("c", tok="5..8", parent="b")),
        asked(["1..4", 99, 99, 99, 99, "5..8"], 4),
        said(store("d", tok=[99, 5, 6, 7]), sender="e2"),
        asked([99, 5, 6, 7], {"e2/0": {"gpu": 0}}),
        placeholders=[99],
    )


async def test_pairs_may_stand_in_events_too() -> None:
    """Pairs are found by their shape, and an EAGLE publisher's flat tokens by the one that is left over."""
    await check(
        said(store("a", tok=[[1, 2], [2, 3], [3, 4], [4, 5]])),
        said(store("a", tok="1..5"), sender="e2"),
        asked("1..5", {"e1/0": {"gpu": 4}, "e2/0": {"gpu": 4}}),
        asked("1..4", {"e1/0": {"gpu": 0}, "e2/0": {"gpu": 0}}),
        asked(["1..4", 9], {"e1/0": {"gpu": 0}, "e2/0": {"gpu": 0}}),
        eagle=["e2"],
    )


async def test_a_parent_of_zero_is_what_the_profile_says() -> None:
    """A root by default; where 0 means unknown the block earns nothing."""
    await check(
        said(store("a", parent=0), sender="e1"),
        said(store("a", parent=0), sender="e2"),
        asked("1..4", {"e1/0": {"gpu": 4}, "e2/0": {"gpu": 0}}),
        parent_zero={"e2": "unknown"},
    )


@pytest.mark.parametrize(
    "fields",
    [{"bs": 0}, {"bs": -1}, {"bs": 1 << 32}, {"tok": "1..3"}, {"tok": [-1, 2, 3, 4]}, {"h": [None]}, {"group": -1}],
    ids=str,
)
async def test_an_event_that_cannot_be_is_refused_alone(fields: Json) -> None:
    """The others of its message are applied."""
    await check(said({**store("a"), **fields}, store("b", tok="5..8")), asked("1..4", 0), asked("5..8", 4), held(1))


async def test_a_rank_that_cannot_be_is_refused() -> None:
    """Its message changes nothing, and is no other rank's."""
    await check(said(store("a"), rank=(1 << 32) - 1), said(store("b", tok="5..8")), asked("1..4", 0), held(1))


# ---- removals, groups, ranks


async def test_one_removal_for_all_copies_is_a_publishers_own() -> None:
    """`one_for_copies` ends both copies at once, where the profile says it of this publisher."""
    twice = [store("a"), store("a"), remove("a")]
    await check(
        said(*twice),
        said(*twice, sender="e2"),
        asked("1..4", {"e1/0": {"gpu": 4}, "e2/0": {"gpu": 0}}),
        removal={"e2": "one_for_copies"},
    )


async def test_copies_that_are_left_count_whatever_the_rule() -> None:
    """`left` wins over the profile's rule, and over the copies counted so far."""
    await check(
        said(store("a"), store("b", tok="5..8"), remove("a", "b", left=[1, 0])),
        asked("1..4", 4),
        asked("5..8", 0),
        said(remove("a", left=0)),
        asked("1..4", 0),
        removal="one_for_copies",
    )


async def test_a_removal_may_end_a_block_in_every_tier() -> None:
    """`one_for_all_tiers`: whichever tier it names."""
    await check(
        said(store("a"), store("a", tier="cpu"), remove("a", tier="cpu")),
        asked("1..4", {"e1/0": {"gpu": 0, "any": 0}}),
        removal="one_for_all_tiers",
    )


async def test_a_state_group_hits_at_its_checkpoints_only() -> None:
    """With a recurrent group a hit ends exactly at a state."""
    await check(
        said(store("a", "b", "c", tok="1..12", group=0), store("b", tok="5..8", parent="a", group=1)),
        asked("1..12", 8),
        asked("1..8", 8),
        said(remove("b", group=1)),
        asked("1..12", 0),
        groups={"0": {"kind": "full"}, "1": {"kind": "mamba"}},
    )


async def test_a_window_wider_than_a_block_needs_its_last_blocks() -> None:
    """Window 6 needs two blocks of four before the hit's end, or all from the start."""
    await check(
        said(store("a", "b", "c", tok="1..12", group=0), store("a", "b", "c", tok="1..12", group=1)),
        said(remove("a", group=1)),
        asked("1..12", 12),
        said(remove("b", group=1)),
        asked("1..12", 0),
        groups={"0": {"kind": "full"}, "1": {"kind": "swa", "window": 6}},
    )


async def test_groups_may_have_blocks_of_several_sizes() -> None:
    """A group with blocks of eight and one with blocks of four agree at multiples of eight, whoever speaks first."""
    await check(
        said(store("A", tok="1..8", bs=8, group=1)),
        said(store("a", "b", "c", tok="1..12", group=0)),
        asked("1..12", 8),
        groups={"0": {"kind": "full"}, "1": {"kind": "mamba"}},
    )


async def test_a_group_that_is_never_told_of_does_not_veto() -> None:
    """A hybrid model whose engine reports its full group alone is credited by that, as an upper bound."""
    await check(said(store("a")), asked("1..4", 4), groups={"0": {"kind": "full"}, "1": {"kind": "mamba"}})


async def test_ranks_have_caches_of_their_own() -> None:
    """What rank 1 removes stays on rank 0; a rank that never spoke is unknown."""
    await check(
        said(store("a")),
        said(store("a"), rank=1),
        said(remove("a"), rank=1),
        asked("1..4", {"e1/0": {"gpu": 4}, "e1/1": {"gpu": 0}, "e1/2": "unknown"}),
    )


# ---- sequence and lives


async def test_a_gap_that_nobody_fills_ends_what_was_known() -> None:
    """Without a replay, blocks from before the gap are not believed, and later ones are."""
    await check(
        said(store("a"), seq=0),
        said(store("b", tok="5..8"), seq=2),
        asked("1..4", 0),
        asked("5..8", 4),
        said(store("c", tok="9..12", parent="b"), seq=3),
        asked("5..12", 8),
    )


async def test_a_late_joiner_believes_what_it_hears() -> None:
    """A first message that is not number 0 is applied."""
    await check(said(store("a"), seq=7), said(store("b", tok="5..8", parent="a"), seq=8), asked("1..8", 8))


async def test_a_message_told_twice_is_applied_once() -> None:
    """The newest message again, as it was, is a repeat: its copies are not counted twice."""
    await check(
        said(store("a"), seq=0),
        said(store("b", tok="5..8"), seq=1),
        said(store("b", tok="5..8"), seq=1),
        said(remove("b"), seq=2),
        asked("1..4", 4),
        asked("5..8", 0),
        removal="per_copy",
    )


async def test_a_restart_that_repeats_the_first_message_is_one() -> None:
    """A step back empties the rank, even if the new process says what the old one said."""
    await check(
        said(store("a"), seq=0),
        said(store("b", tok="5..8", parent="a"), seq=1),
        said(store("a"), seq=0),
        asked("1..8", 4),
        said(remove("a"), seq=1),
        asked("1..8", 0),
        removal="per_copy",
    )


async def test_ranks_count_for_themselves() -> None:
    """Rank 1 starts at 0 while rank 0 is at 1, and neither is restarted."""
    await check(
        said(store("a"), seq=0),
        said(store("b", tok="5..8", parent="a"), seq=1),
        said(store("a"), seq=0, rank=1),
        asked("1..8", {"e1/0": {"gpu": 8}, "e1/1": {"gpu": 4}}),
    )


def replay(*messages: Json, asked_from: int, **fields: Any) -> Json:
    return {"ctl": "replay", "from": "e1", "asked": asked_from, "msgs": list(messages), "end": True, **fields}


async def test_a_ring_that_forgot_the_beginning_leaves_a_hole() -> None:
    """A replay that starts later than asked ends what was known; what it holds counts."""
    await check(
        said(store("a"), seq=0),
        said(store("d", tok="13..16", parent="c"), seq=9),
        replay(
            said(store("b", tok="5..8"), seq=7),
            said(store("c", tok="9..12", parent="b"), seq=8),
            said(store("d", tok="13..16", parent="c"), seq=9),
            asked_from=1,
        ),
        asked("1..4", 0),
        asked("5..16", 12),
    )


async def test_an_empty_replay_of_an_idle_source_changes_nothing() -> None:
    """Nothing newer is no restart."""
    await check(said(store("a"), seq=0), replay(asked_from=1), asked("1..4", 4))


async def test_a_replay_finds_the_lost_tail() -> None:
    """An idle source that is asked tells what was lost, without any live message."""
    await check(said(store("a"), seq=0), replay(said(remove("a"), seq=1), asked_from=1), asked("1..4", 0))


async def test_a_replay_shows_a_restart() -> None:
    """A ring with other messages under known numbers is another process's: what was known goes."""
    await check(
        said(store("a"), seq=0),
        said(store("b", tok="5..8", parent="a"), seq=1),
        replay(said(store("c", tok="9..12"), seq=0), asked_from=2),
        asked("1..8", 0),
        asked("9..12", 4),
        said(store("d", tok="13..16", parent="c"), seq=1),
        asked("9..16", 8),
    )


async def test_a_replay_that_breaks_off_is_asked_for_again() -> None:
    """The second answer brings the rest, and nothing is applied twice."""
    gone, again = said(remove("a"), seq=1), said(store("a"), seq=2)
    await check(
        said(store("a"), seq=0),
        said(store("b", tok="5..8", parent="a"), seq=3),
        {**replay(gone, asked_from=1), "end": False},
        replay(gone, again, said(store("b", tok="5..8", parent="a"), seq=3), asked_from=2),
        asked("1..8", 8),
        said(remove("a"), seq=4),
        asked("1..8", 0),
        removal="per_copy",
    )


async def test_another_pod_behind_the_address_is_another_life() -> None:
    """A new uid begins empty; late messages and the late death of the old one do not touch it."""
    await check(
        said(store("a"), uid="u1", seq=0),
        said(store("b", tok="5..8"), uid="u2", seq=0),
        asked("1..4", 0),
        asked("5..8", 4),
        said(store("c", tok="9..12"), uid="u1", seq=1),
        {"ctl": "gone", "from": "e1", "uid": "u1"},
        said(store("d", tok="9..12", parent="b"), seq=1),
        asked("5..12", 8),
        asked("9..12", 0),
    )


async def test_a_life_ends_for_all_ranks() -> None:
    """`up` with a higher number, and `gone`, concern every rank of the replica."""
    await check(
        said(store("a"), inc=1),
        said(store("a"), inc=1, rank=1),
        {"ctl": "up", "from": "e1", "inc": 2},
        asked("1..4", {"e1/0": {"gpu": 0}, "e1/1": {"gpu": 0}}),
        said(store("a"), inc=1, rank=2),
        said(store("a"), inc=2, rank=1),
        asked("1..4", {"e1/0": {"gpu": 0}, "e1/1": {"gpu": 4}, "e1/2": {"gpu": 0}}),
        {"ctl": "gone", "from": "e1"},
        asked("1..4", {"e1/1": "unknown"}),
        said(store("a"), rank=1),
        asked("1..4", {"e1/1": {"gpu": 0}}),
        {"ctl": "up", "from": "e1"},
        said(store("a"), rank=1),
        asked("1..4", {"e1/1": {"gpu": 4}}),
    )


async def test_a_snapshot_replaces_what_was_known() -> None:
    """It stands for all up to its number: older messages are part of it, newer ones follow."""
    await check(
        said(store("a"), seq=0),
        said(store("c", tok="9..12", parent="b"), seq=3),
        {"ctl": "snapshot", "from": "e1", "seq": 2, "ev": [store("b", tok="5..8")]},
        asked("1..4", 0),
        asked("5..12", 8),
        said(store("a"), seq=1),
        said(remove("b"), seq=4),
        asked("1..4", 0),
        asked("5..8", 0),
    )


# ---- the log


async def test_records_of_a_log_that_come_again_change_nothing() -> None:
    """A lower number on a log is a repeat."""
    first, second = said(store("a"), seq=0, via="log:p0"), said(remove("a"), seq=1, via="log:p0")
    await check(first, second, first, asked("1..4", 0), first, second, asked("1..4", 0), removal="per_copy")


async def test_records_of_an_ended_life_that_come_late_change_nothing() -> None:
    """A log that brings the old life behind the new one."""
    await check(
        said(store("a"), seq=0, inc=2, via="log:p1"),
        said(store("b", tok="5..8"), seq=0, inc=1, via="log:p0"),
        asked("1..4", 4),
        asked("5..8", 0),
    )


# ---- payloads as engines send them


async def test_payloads_of_engines_and_broken_ones() -> None:
    """Raw values and hex bytes go through the engine's decoder; a broken payload changes nothing."""
    await check(
        {"from": "e1", "hex": "ddffffffff"},
        {"from": "e1", "engine": "sglang", "hex": "c1"},
        {"from": "e1", "hex": ""},
        {
            "from": "e1",
            "engine": "sglang",
            "raw": [1.0, [{"type": "BlockStored", "block_hashes": [-5], "parent_block_hash": None,
                           "token_ids": [1, 2, 3, 4], "block_size": 4, "medium": "CPU_PINNED"}], 0],
        },
        {"from": "e1", "engine": "vllm", "raw": [1.0, [["BlockRemoved", [{"bin": "ff" * 8}], "CPU"]], 0]},
        asked("1..4", {"e1/0": {"gpu": 0, "any": 4}}),
        {"from": "e1", "engine": "vllm", "raw": [1.0, [["BlockRemoved", [(1 << 64) - 5], "CPU"]], 0]},
        asked("1..4", {"e1/0": {"gpu": 0, "any": 0}}),
    )  # fmt: skip


async def test_pictures_of_payloads_have_offsets() -> None:
    """vLLM tells where in its block a picture begins; a question gives the same place in the prompt."""
    event = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 9, 9, 9, 9, 3, 4],
        "block_size": 4, "medium": "GPU", "extra_keys": [[["A", 2]], [["A", -2]]],
    }  # fmt: skip
    tokens = [1, 2, 9, 9, 9, 9, 3, 4]
    await check(
        {"from": "e1", "engine": "vllm", "raw": [1.0, [event], 0]},
        asked(tokens, 8, mm=[{"id": "A", "at": 2, "len": 4}]),
        asked(tokens, 0, mm=[{"id": "A", "at": 3, "len": 3}]),
    )


async def test_a_payload_of_another_rank_is_not_this_ranks() -> None:
    """The rank of the subscription is the one that was verified."""
    event = ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"]
    await check({"from": "e1", "engine": "vllm", "raw": [1.0, [event], 1]}, asked("1..4", 0))


def pulled(number: int, data: Json, **fields: Any) -> Json:
    return {"from": "e1", "engine": "trtllm", "raw": {"event_id": number, "data": data, **fields}}


def chain(*names: int, parent: int | None = None, first: int = 1) -> Json:
    """Return a stored chain of blocks of four tokens."""
    blocks = [
        {"block_hash": name, "tokens": [{"token_id": token} for token in range(start, start + 4)], "cache_level": 0}
        for name, start in zip(names, range(first, 1 << 20, 4), strict=False)
    ]
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


async def test_drained_removals_take_what_is_below() -> None:
    """TensorRT-LLM names the topmost removed block alone; a gap in its numbers is a new life."""
    await check(
        pulled(0, chain(1, 2, 3)),
        asked("1..12", 12),
        pulled(1, {"type": "removed", "block_hashes": [2]}),
        asked("1..12", 4),
        pulled(2, chain(2, parent=1, first=5)),
        asked("1..12", 8),
        pulled(5, chain(4, first=13)),
        asked("1..12", 0),
        asked("13..16", 4),
    )


async def test_only_the_largest_window_of_a_drain_counts() -> None:
    """Each window tells of its own copies under the same names."""
    await check(
        pulled(0, {"type": "created", "num_blocks_per_cache_level": [9, 9]}, window_size=512),
        pulled(1, {"type": "created", "num_blocks_per_cache_level": [9, 9]}, window_size=4096),
        pulled(2, chain(1, 2), window_size=512),
        pulled(3, chain(1, 2), window_size=4096),
        pulled(4, {"type": "removed", "block_hashes": [1]}, window_size=512),
        asked("1..8", 8),
        {"from": "e1", "engine": "trtllm", "hex": "5b"},
        {
            "from": "e1",
            "engine": "trtllm",
            "raw": [{"event_id": 5, "window_size": 4096, "data": chain(3, parent=2, first=9)}],
        },
        asked("1..12", 12),
    )
