"""What is known of each SGLang version, and combinations that cannot be read rightly."""

from typing import Any

import pytest

from relays.decoders import decoder_of
from relays.dialects import EngineSettings, profile_for, sglang_profile
from schemas.errors import ConfigError
from schemas.profiles import Group, Profile, TierProfile
from tests.support.payloads import batch, pack
from tests.support.sglang_frames import map_stored


def known(version: str, **settings: Any) -> Profile:
    return sglang_profile("m", "r", version, EngineSettings(**settings))


@pytest.mark.parametrize("version", ["0.4.7", "0.5.5", "0.5.1.post3"])
def test_versions_with_broken_parents_are_refused(version: str) -> None:
    """Up to 0.5.5 the first page of every node says that it has no parent, so no index can be right."""
    with pytest.raises(ConfigError, match=r"0\.5\.6 is the first usable one"):
        known(version)


HIDDEN = [
    ("0.5.6", ("extra_key", "salt", "adapter")),
    ("0.5.17", ("extra_key", "salt", "adapter")),
    ("0.5.18", ("extra_key", "adapter")),
    ("0.5.22", ("extra_key", "adapter")),
    ("0.5.23", ("extra_key",)),
]


@pytest.mark.parametrize(("version", "hidden"), HIDDEN)
def test_each_version_hides_other_parts_of_the_namespace(version: str, hidden: tuple[str, ...]) -> None:
    """Salts are told from 0.5.18 on, adapters from 0.5.23 on (0.5.22: in one format), a caller's extra key never."""
    assert known(version).hidden_namespaces == hidden


@pytest.mark.parametrize(
    ("version", "hicache", "marks"),
    [
        ("0.5.10.post1", True, ("tier_uncertain",)),
        ("0.5.10.post1", False, ()),
        ("0.5.11", True, ()),
        ("0.5.23", True, ()),
    ],
)
def test_a_silent_demotion_marks_the_tier(version: str, hicache: bool, marks: tuple[str, ...]) -> None:
    """Up to 0.5.10 HiCache moves pages to the host without an event: what is known is taken for the slower tier."""
    profile = known(version, hicache=hicache)
    assert profile.marks == marks
    (event,) = decoder_of(profile)(0, pack(batch(map_stored()))).events
    assert getattr(event, "tier", None) == ("host" if marks else "gpu")


def test_tiers_alternate_and_a_clear_takes_them_all() -> None:
    """A match goes on over device and host alike, and a flush empties both."""
    profile = known("0.5.23")
    assert profile.tier_walk == "mixed"
    assert profile.clear_scope == "all"
    assert profile.tiers == (TierProfile("gpu"), TierProfile("host", least_tokens=10))
    assert (profile.removal, profile.cascade, profile.replay) == ("per_copy", False, "ring")


@pytest.mark.parametrize("unreported", [(), ("window",), ("state",), ("window", "state")])
@pytest.mark.parametrize("policy", ["credit", "gone"])
def test_a_hybrid_model_is_an_upper_bound(unreported: tuple[str, ...], policy: str) -> None:
    """Events describe full attention only; what the operator says is missing marks the replica."""
    profile = known("0.5.23", unreported=unreported, upper_bound_policy=policy)
    assert profile.upper_bound is bool(unreported)
    assert profile.upper_bound_policy == policy


def test_pages_are_the_unit_and_the_alignment() -> None:
    """A page size that the operator leaves out is learnt from the first store."""
    assert known("0.5.23", block_size=16).groups == (Group(0, "full", 16),)
    assert (known("0.5.23", block_size=16).unit, known("0.5.23", block_size=16).alignment) == (16, 16)
    assert (known("0.5.23").unit, known("0.5.23").groups) == (0, ())


def test_eagle_keeps_pairs() -> None:
    """Drafting with EAGLE makes a page one of pairs; nothing is dropped from a hit."""
    assert known("0.5.23", drafting="eagle").drafting == "pairs"
    assert known("0.5.23").drafting == "none"


def test_the_dialect_is_chosen_by_configuration() -> None:
    """`sglang` is an engine of its own, whose item 7 is no adapter's name."""
    assert profile_for("sglang", "m", "r", "0.5.19", EngineSettings()).dialect == "sglang"
