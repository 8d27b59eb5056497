"""Batches of LMCache's multiprocess server: what they say, what of them is refused, and what the real one said."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from relays.dialects import PoolSettings, pool_profile
from relays.engine_events import RejectReason, Removed, Stored
from relays.lmcache_mp import MAX_BATCH_BYTES, lmcache_profile
from relays.mirror import Mirror
from schemas.errors import ConfigError, FrameError
from tests.support.engines import chain
from tests.support.lmcache_frames import CHUNK, MODEL, event, frames, message, name, read, recorded

TOKENS = [1, 2, 3, 4]

READ = [
    (event(), Stored(hashes=(name(1),), tokens=TOKENS, block_size=4, tier="host")),
    (
        event(parent_block_hash=name(9)),
        Stored(hashes=(name(1),), parent=name(9), tokens=TOKENS, block_size=4, tier="host"),
    ),
    # an 8-byte name (`builtin` hash) is kept as it is
    (event("stored", b"12345678"), Stored(hashes=(b"12345678",), tokens=TOKENS, block_size=4, tier="host")),
    (event(medium="DISK"), Stored(hashes=(name(1),), tokens=TOKENS, block_size=4, tier="other")),
    (
        event("stored", name(1), name(2), token_ids=[*TOKENS, *TOKENS]),
        Stored(hashes=(name(1), name(2)), tokens=[*TOKENS, *TOKENS], block_size=4, tier="host"),
    ),
    (
        event(token_ids=[0, 1, 2, (1 << 63) - 1]),
        Stored(hashes=(name(1),), tokens=[0, 1, 2, (1 << 63) - 1], block_size=4, tier="host"),
    ),
    (event("removed"), Removed(hashes=(name(1),), tier="host")),
    (event("removed", name(1), name(2)), Removed(hashes=(name(1), name(2)), tier="host")),
]


@pytest.mark.parametrize(("record", "expected"), READ)
def test_a_record_says_what_became_of_which_chunk(record: dict[str, Any], expected: Stored | Removed) -> None:
    """A store brings its tokens and the chunk before; a removal brings names."""
    batch = read(message(record), chunk=4)
    assert batch.decoded.events == (expected,)
    assert not batch.decoded.rejects


REFUSED = [
    (event("cleared"), RejectReason.UNKNOWN_EVENT, "kind: 'cleared'"),
    (event(model_name="other"), RejectReason.OTHER_SOURCE, "model_name: 'other'"),
    (event(block_hashes=[]), RejectReason.HASH, "block_hashes: none"),
    (event("removed", block_hashes=[]), RejectReason.HASH, "block_hashes: none"),
    (event("stored", b"short"), RejectReason.HASH, "block_hashes[0]: 5 bytes"),
    (event("removed", name(1), b"x" * 65), RejectReason.HASH, "block_hashes[1]: 65 bytes"),
    (event(parent_block_hash=b""), RejectReason.HASH, "parent_block_hash: 0 bytes"),
    (event(token_ids=[]), RejectReason.TOKEN_COUNT, "token_ids: 0 for 1"),
    (event(token_ids=[1, 2, 3]), RejectReason.TOKEN_COUNT, "token_ids: 3 for 1"),
    (event(token_ids=[*TOKENS, *TOKENS]), RejectReason.TOKEN_COUNT, "token_ids: 8 for 1"),
    (event(token_ids=[1, 2, 3, -4]), RejectReason.TOKEN_RANGE, "token_ids: outside"),
]


@pytest.mark.parametrize(("record", "reason", "detail"), REFUSED)
def test_a_record_that_cannot_be_used_costs_itself_alone(
    record: dict[str, Any], reason: RejectReason, detail: str
) -> None:
    """It is refused with its place, and its neighbours are read."""
    batch = read(message(event(), record, event("removed")), chunk=4)
    assert [type(event) for event in batch.decoded.events] == [Stored, Removed]
    (reject,) = batch.decoded.rejects
    assert (reject.reason, reject.position) == (reason, 1)
    assert reject.detail.startswith(detail)


BROKEN = [
    (b"\xff\xff\xff", "batch_malformed"),
    (b"\x2a\x10abc", "batch_malformed"),
    (message(next_cursor=-1), "sequence"),
    (message(next_cursor=(1 << 53) + 1), "sequence"),
    (message(event(), event(), numbers=[2, 2]), "sequence"),
    (message(event(), event(), numbers=[2, 1]), "sequence"),
    (message(event(), numbers=[0]), "sequence"),
    (message(event(), numbers=[5], next_cursor=4), "sequence"),
    (b"\0" * (MAX_BATCH_BYTES + 1), "payload_bytes"),
    (message(*[event("removed")] * 100_001), "event_count"),
]


@pytest.mark.parametrize(("payload", "reason"), BROKEN)
def test_a_message_that_is_no_batch_is_refused_whole(payload: bytes, reason: str) -> None:
    """Records out of order mean that the cursor cannot be trusted either."""
    with pytest.raises(FrameError) as refused:
        read(payload)
    assert refused.value.reason == reason


def test_a_batch_that_is_cut_anywhere_is_refused_or_read() -> None:
    """What is cut behind a record reads as a shorter batch; gRPC tells lengths, so none arrives."""
    payload = message(event(parent_block_hash=name(9)), event("removed"))
    whole = read(payload, chunk=4).decoded.events
    lengths: list[int] = []
    for end in range(len(payload)):
        with suppress(FrameError):
            events = read(payload[:end], chunk=4).decoded.events
            assert events == whole[: len(events)]
            lengths.append(len(events))
    assert lengths.count(1) == 1


def test_a_batch_says_where_the_stream_stands() -> None:
    """The next cursor is the sequence, which may be past the last record: other models' records have numbers too."""
    batch = read(message(event(), numbers=[3], next_cursor=9, lost=True, incarnation=1 << 62), chunk=4)
    assert (batch.enabled, batch.incarnation, batch.lost) == (True, 1 << 62, True)
    assert (batch.decoded.sequence, batch.decoded.time_s, batch.decoded.rank) == (9, 1.5, None)
    assert not read(b"").enabled


def test_all_that_the_real_server_sent_is_read() -> None:
    """Nothing of the recordings is refused."""
    batches = [read(payload) for payload in frames("plain", "tp2", "lives")]
    assert not [reject for batch in batches for reject in batch.decoded.rejects]
    kinds = [type(event) for batch in batches for event in batch.decoded.events]
    assert (kinds.count(Stored), kinds.count(Removed)) == (201, 21)


def test_a_clear_of_the_real_server_is_one_removal_of_everything() -> None:
    """There is no event of its own for it."""
    mirror = Mirror(lmcache_profile(MODEL, "node7"))
    batches = [read(payload) for payload in frames("plain")]
    for batch in batches:
        mirror.apply(batch.decoded.events)
    (last,) = batches[-1].decoded.events
    assert isinstance(last, Removed)
    assert len(last.hashes) > 1
    assert not mirror.blocks


@pytest.mark.parametrize("recording", ["plain", "tp2"])
def test_the_mirror_finds_what_the_real_server_finds(recording: str) -> None:
    """At each look-up of the recording the chunks held from the start on are those that LMCache itself found."""
    mirror = Mirror(lmcache_profile(MODEL, "node7"))
    assert played(recording, mirror) > 25
    assert not mirror.counts


def test_copies_of_a_chunk_cannot_be_counted() -> None:
    """Two workers store it in two records and lose it in one: counting would keep what is gone."""
    profile = msgspec.structs.replace(lmcache_profile(MODEL, "node7"), removal="per_copy")
    with pytest.raises(AssertionError):
        played("tp2", Mirror(profile))


def played(recording: str, mirror: Mirror) -> int:
    """Play a recording into a mirror, comparing at each look-up; return how many there were."""
    lookups = 0
    for line in recorded(recording):
        if line.frame:
            mirror.apply(read(line.payload).decoded.events)
        elif line.lookup is not None:
            lookups += 1
            held = dict(mirror.resident())
            hashes = chain(line.lookup.tokens, CHUNK, model=MODEL)
            found = next((n for n, block_hash in enumerate(hashes) if block_hash not in held), len(hashes))
            assert found == line.lookup.chunks
    return lookups


def test_a_pool_of_this_kind_is_chosen_by_name() -> None:
    """Its unit is the chunk; a size that is none is refused."""
    assert pool_profile("lmcache", "m", "node7", PoolSettings(block_size=128)) == lmcache_profile("m", "node7", 128)
    with pytest.raises(ConfigError, match="chunk"):
        lmcache_profile("m", "node7", 0)
