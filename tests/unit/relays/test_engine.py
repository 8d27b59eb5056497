"""One rank of an engine: messages in, records out."""

from typing import Any

import msgspec
import pytest

from relays.decoders import decoder_of
from relays.dialects import EngineSettings, vllm_profile
from relays.engine import EngineRank
from schemas.errors import ConfigError
from schemas.events import BlocksStored, ProfileChanged, decode_record, encode_record
from schemas.profiles import Group
from tests.support.engines import HOLDER, chain, profile, resident, tokens
from tests.support.payloads import array_stored, batch, map_removed, pack
from tests.support.vllm_frames import map_stored


def rank(version: str = "0.32.0", **settings: Any) -> EngineRank:
    return EngineRank(vllm_profile("m", "r", version, EngineSettings(**settings)), HOLDER, life=1)


def test_a_message_becomes_a_record() -> None:
    """A store goes in as bytes and comes out as the profile and a run of our hashes, with the engine's sequence."""
    engine = rank()
    engine.take(5, pack(batch(map_stored(kv_cache_spec_kind="full_attention"))))
    (record,) = engine.speak()
    assert isinstance(record.events[0], ProfileChanged)
    assert record.events[0].profile.groups == (Group(0, "full", 4),)
    assert isinstance(record.events[1], BlocksStored)
    assert record.events[1].blocks == chain([1, 2, 3, 4])[0].to_bytes(8, "little")
    assert record.engine_sequence == {"0": 5}


def test_a_connector_that_hides_the_salt_moves_no_block() -> None:
    """Self-describing host stores have no extra keys; their block stays in the namespace that the device told."""
    engine = rank(connector="offloading")
    device = map_stored(kv_cache_spec_kind="full_attention", extra_keys=[["tenant"]])
    host = map_stored(kv_cache_spec_kind="full_attention", medium="CPU")
    engine.take(0, pack(batch(device)))
    engine.take(1, pack(batch(host)))
    assert set(resident(engine.mirror)) == set(chain([1, 2, 3, 4], salt="tenant"))
    assert not any(engine.mirror.counts.values())
    engine.take(2, pack(batch(map_removed())))
    assert set(resident(engine.mirror)) == set(chain([1, 2, 3, 4], salt="tenant"))


def test_a_broken_message_is_counted_and_passed() -> None:
    """A message that cannot be read changes nothing, and its sequence is passed all the same."""
    engine = rank()
    assert engine.take(8, b"\xc1") is None
    assert engine.counts == {"batch_malformed": 1}
    assert engine.received == {"0": 8}
    assert resident(engine.mirror) == {}


def test_a_refused_event_is_counted_beside_the_others() -> None:
    """One bad event of a batch is counted by its reason, the rest is applied."""
    engine = rank()
    engine.take(0, pack(batch(map_stored(token_ids=[1, 2, 3]), map_stored())))
    assert engine.counts == {"token_count": 1}
    assert set(resident(engine.mirror)) == set(chain([1, 2, 3, 4]))


def test_a_batch_that_names_another_rank_is_refused() -> None:
    """The subscription's rank wins: a batch of rank 1 on rank 0's socket is counted and not applied."""
    engine = rank()
    assert engine.take(0, pack(batch(map_stored(), rank=1))) is None
    assert engine.counts == {"rank_mismatch": 1}
    assert resident(engine.mirror) == {}
    assert engine.take(1, pack(batch(map_stored(), rank=None))) is not None


@pytest.mark.parametrize("sequence", [(1 << 53) + 2, (1 << 64) - 1])
def test_what_a_relay_says_can_be_read(sequence: int) -> None:
    """A sequence that no record can carry is refused at the engine's door, not by every worker afterwards."""
    engine = rank()
    engine.take(1, pack(batch(map_stored())))
    engine.take(sequence, pack(batch(map_stored())))
    for record in engine.speak():
        assert decode_record(encode_record(record)) == record


def test_a_new_life_starts_empty_as_it_was_configured() -> None:
    """After a restart nothing is resident or learnt, so an engine that came back with other blocks is understood."""
    engine = rank("0.32.0")
    engine.take(0, pack(batch(map_stored(kv_cache_spec_kind="full_attention"))))
    list(engine.speak())
    engine.begin_life(2)
    assert resident(engine.mirror) == {}
    assert engine.received == {}
    (record,) = engine.speak()
    assert (record.life, record.sequence) == (2, 1)
    assert isinstance(record.events[0], ProfileChanged)
    assert record.events[0].profile.groups == ()
    eight = map_stored(token_ids=list(range(8)), block_size=8)
    engine.take(0, pack(batch(eight)))
    assert len(resident(engine.mirror)) == 1
    assert engine.mirror.profile.unit == 8


def test_a_smaller_block_makes_the_unit_smaller() -> None:
    """Where nobody gave the unit, what was hashed in blocks of eight is void once blocks of four appear."""
    engine = rank("0.32.0")
    engine.take(0, pack(batch(map_stored(token_ids=list(range(8)), block_size=8))))
    engine.take(1, pack(batch(map_stored(block_hashes=[12]))))
    assert engine.mirror.profile.unit == 4
    assert len(resident(engine.mirror)) == 1
    assert engine.mirror.counts["unit_relearnt"] == 1


def test_everything_can_be_said_again_in_a_higher_life() -> None:
    """A relay that must tell anew says the profile and all that is resident."""
    engine = rank()
    engine.take(0, pack(batch(map_stored())))
    first = list(engine.speak())
    engine.say_again(2)
    again = list(engine.speak())
    assert [record.events for record in again] == [record.events for record in first]
    assert [(record.life, record.sequence) for record in again] == [(2, 1)]


def test_a_heartbeat_says_what_was_received() -> None:
    """A heartbeat carries each source's last sequence, applied or not."""
    engine = rank()
    engine.take(4, b"\xc1", source="1")
    beat = engine.beat("catching_up", share_known=0.5, reason="replay")
    assert beat.sequence == 0
    assert [event for event in beat.events if getattr(event, "received", None) == {"1": 4}]


def test_a_group_whose_kind_has_no_rule_earns_nothing() -> None:
    """Chunked local attention has no hit rule here, so its blocks are not credited as if it were full attention."""
    engine = rank()
    engine.take(0, pack(batch(map_stored(kv_cache_spec_kind="chunked_local_attention"))))
    assert resident(engine.mirror) == {}


def test_before_0_20_all_events_are_of_one_group() -> None:
    """An old version's group index is not read."""
    engine = rank("0.14.1", block_size=4)
    engine.take(0, pack(batch(array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 7))))
    assert engine.mirror.profile.groups == (Group(0, "full", 4),)


def test_a_salted_prompt_of_an_old_version_matches_no_prompt() -> None:
    """With a known seed a first block whose hash is not the unsalted one is kept out (0.14)."""
    engine = rank("0.14.1", block_size=4, hash_seed="0")
    engine.take(0, pack(batch(array_stored([123], None, tokens(1), 4, None, "GPU"))))
    assert resident(engine.mirror) == {}
    assert engine.mirror.counts["namespace_hidden"] == 1


def test_a_dialect_without_a_decoder_stops_the_start() -> None:
    """A profile of an unknown dialect raises ConfigError that names it."""
    with pytest.raises(ConfigError, match="dialect: 'other'"):
        decoder_of(profile_of_dialect("other"))


def profile_of_dialect(dialect: str) -> Any:
    return msgspec.structs.replace(profile(), dialect=dialect)
