"""Records on the wire: what goes in comes out, and what cannot be right is refused with its place."""

import dataclasses
from typing import Any

import msgspec
import pytest

from schemas.errors import FrameError
from schemas.events import (
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    HolderCleared,
    ProfileChanged,
    Record,
    decode_record,
    encode_record,
)
from schemas.profiles import Group, GroupClass, Holder
from tests.support.engines import FULL, pairs, profile, tiers
from tests.support.records import gone, record, run

FULL_GROUP = Group(0, "full", 4)
HALF = GroupClass("full", None, 2)
FULL_RECORD = record(
    ProfileChanged(profile()),
    HolderCleared(),
    run([1, 2]),
    gone([7], depth=2, path=0),
    Heartbeat("stale", {"0": 9}, 0.5, "gap"),
    engine_sequence={"0": 9},
    paths=[[1, 2]],
)


def encoded(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


def fields(**changes: object) -> bytes:
    """Encode a plain record with some of its positions changed."""
    values: dict[str, Any] = msgspec.structs.asdict(record(run([1])))
    return encoded(*{**values, **changes}.values())


def test_a_record_with_every_kind_of_event_comes_back_whole() -> None:
    """Encoding and decoding a record with all event kinds gives an equal record."""
    assert decode_record(encode_record(FULL_RECORD)) == FULL_RECORD


def test_the_holder_of_a_pool_has_no_rank() -> None:
    """A record without a rank belongs to the pool of that name."""
    back = decode_record(encode_record(record(run([1]), holder=Holder("node7", None))))
    assert back.holder == Holder("node7", None)


def test_a_field_added_later_is_passed_over() -> None:
    """A longer record of the same version is read as far as it is known here."""
    longer = encoded(*msgspec.structs.astuple(FULL_RECORD), "of a later version")
    assert decode_record(longer) == FULL_RECORD


def test_a_run_without_engine_hashes_may_leave_them_out() -> None:
    """An array that ends before the optional engine hashes is a whole run."""
    events = [["stored", 0, 0, b"\1" + b"\0" * 7, 1]]
    assert decode_record(fields(events=events)).events == (run([1]),)


@dataclasses.dataclass(frozen=True)
class Bad:
    """A record that must be refused."""

    name: str
    data: bytes
    reason: str
    place: str = ""


BAD = [
    Bad("nothing", b"", "record_malformed"),
    Bad("no msgpack", b"\xc1", "record_malformed"),
    Bad("a map", msgspec.msgpack.encode({"version": 1}), "record_malformed"),
    Bad("cut off", encode_record(FULL_RECORD)[:-1], "record_malformed"),
    Bad("a byte too many", encode_record(FULL_RECORD) + b"\0", "record_malformed"),
    Bad("an unknown event", fields(events=[["exploded"]]), "record_malformed", "exploded"),
    Bad("a name that is no text", fields(name=b"\xff"), "record_malformed"),
    Bad("a name of broken UTF-8", fields(name="r").replace(b"\xa1r", b"\xa1\xff"), "record_malformed"),
    Bad("nested too deeply", b"\x91" * 100_000, "record_malformed"),
    Bad("another version", fields(version=2), "record_version", "version 2"),
    Bad("no blocks", fields(events=[BlocksStored(0, 0, b"", 1)]), "record_bounds", "events[0].blocks"),
    Bad("half a block", fields(events=[run([1]), BlocksRemoved(0, 0, b"12345")]), "record_bounds", "events[1].blocks"),
    Bad("a negative depth", fields(events=[run([1], depth=-1)]), "record_bounds", "depth_blocks: -1"),
    Bad("a depth of 2^31", fields(events=[run([1], depth=1 << 31)]), "record_bounds", "depth_blocks"),
    Bad("no path", fields(events=[run([1], depth=1)]), "record_bounds", "path: 0"),
    Bad("a negative path", fields(events=[run([1], depth=1, path=-1)], paths=[b"8" * 8]), "record_bounds", "path: -1"),
    Bad("a short path", fields(events=[gone([1], depth=2)], paths=[b"8" * 8]), "record_bounds", "does not lead to 2"),
    *(
        Bad(f"a profile with {name}", fields(events=[ProfileChanged(facts)]), reason, place)
        for name, facts, reason, place in [
            ("a negative unit", profile(unit=-1), "record_malformed", "[1].unit"),
            ("a unit of 2^33 tokens", profile(FULL_GROUP, unit=1 << 33), "record_malformed", "[1].unit"),
            ("a negative alignment", profile(alignment=-4), "record_malformed", "[1].alignment"),
            ("a block of nothing", profile(Group(0, "full", 0)), "record_malformed", "groups[0].block_size"),
            ("a window of nothing", profile(Group(0, "window", 4, 0)), "record_malformed", "groups[0].window"),
            ("a window without a size", profile(Group(0, "window", 4)), "record_bounds", "events[0].profile: "),
            ("half a unit", profile(Group(0, "full", 2), unit=4), "record_bounds", "not a multiple of the unit 4"),
            ("a pair of half a unit", profile(pairs=pairs((HALF, "gpu")), unit=4), "record_bounds", "the unit 4"),
            ("17 pairs", profile(pairs=17 * pairs((FULL, "gpu"))), "record_malformed", "[1].pairs"),
            ("no tier", profile(tiers=()), "record_malformed", "[1].tiers"),
            ("a chunk of nothing", profile(tiers=tiers("gpu", chunk=0)), "record_malformed", "tiers[0].chunk"),
        ]
    ),
    Bad("residency 0", fields(events=[run([1], residency=0)]), "record_bounds", "residency: 0"),
    Bad("17 bits of residency", fields(events=[run([1], residency=1 << 16)]), "record_bounds", "residency"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_record_that_cannot_be_right_is_refused_with_its_reason(bad: Bad) -> None:
    """A malformed record raises FrameError whose reason is a label and whose text names the place."""
    with pytest.raises(FrameError) as caught:
        decode_record(bad.data)
    assert caught.value.reason == bad.reason
    assert bad.place in caught.value.detail


OUT_OF_BOUNDS: dict[str, dict[str, object]] = {
    "a negative life": {"life": -1},
    "a life that Lua's numbers cannot hold": {"life": (1 << 53) + 1},
    "a negative sequence": {"sequence": -1},
    "a sequence that Lua's numbers cannot hold": {"sequence": (1 << 53) + 1},
    "a negative engine sequence": {"engine_sequence": {"0": -1}},
    "a source of 256 bytes": {"engine_sequence": {"x" * 256: 1}},
    "256 sources": {"engine_sequence": {str(source): 1 for source in range(256)}},
    "a source with a zero byte": {"engine_sequence": {"a\0b": 1}},
    "a heartbeat with a negative sequence": {"events": [Heartbeat("live", {"0": -1})]},
    "a heartbeat with 256 sources": {"events": [Heartbeat("live", {str(source): 1 for source in range(256)})]},
    "a name with a zero byte": {"name": "a\0b"},
    "a name of 64 KiB": {"name": "r" * 65_536},
    "a negative rank": {"rank": -1},
    "a path that is no multiple of a hash": {"events": [run([1], depth=1)], "paths": [b"8" * 9]},
    "a path of 128 blocks": {"events": [run([1], depth=1)], "paths": [b"8" * 128 * 8]},
    "engine hashes that are not parallel": {
        "events": [BlocksStored(0, 0, b"\0" * 16, 1, b"\0" * 8)],
    },
}


@pytest.mark.parametrize("changes", OUT_OF_BOUNDS.values(), ids=OUT_OF_BOUNDS)
def test_a_number_that_no_store_can_take_is_refused(changes: dict[str, object]) -> None:
    """A record that would break the store's packing or its numbers is refused before it gets there."""
    with pytest.raises(FrameError, match="record_bounds"):
        decode_record(fields(**changes))


def test_the_fields_helper_makes_a_readable_record() -> None:
    """The builder of this file's broken records makes a sound one when nothing is changed."""
    assert decode_record(fields()) == record(run([1]))
    assert isinstance(decode_record(fields()), Record)
