"""What is known of each vLLM version, and combinations that cannot be read rightly."""

from typing import Any

import msgspec
import pytest

from relays.dialects import DEFAULT_SEED, EngineSettings, has_groups, parse_version, places_media, vllm_profile
from schemas.errors import ConfigError
from schemas.profiles import Group, HashScheme, Profile, TierProfile


def known(version: str, **settings: Any) -> Profile:
    return vllm_profile("m", "r", version, EngineSettings(**settings))


VERSIONS = [
    ("0.32.0", (0, 32, 0)),
    ("0.5.10.post1", (0, 5, 10)),
    ("0.11.1rc2", (0, 11, 1)),
    ("1", (1,)),
    ("0.12.0+cpu", (0, 12, 0)),
]


@pytest.mark.parametrize(("text", "numbers"), VERSIONS)
def test_a_version_is_its_numbers(text: str, numbers: tuple[int, ...]) -> None:
    """Suffixes are dropped, so that versions compare."""
    assert parse_version(text) == numbers


@pytest.mark.parametrize("text", ["", "main", "v0.32.0"])
def test_a_version_without_a_number_stops_the_start(text: str) -> None:
    """What does not begin with a number raises ConfigError that shows it."""
    with pytest.raises(ConfigError, match="engine version"):
        parse_version(text)


def test_a_version_older_than_its_events_is_refused() -> None:
    """0.10 is refused by name, 0.11 is the first that is read."""
    with pytest.raises(ConfigError, match=r"0\.10\.2 is older than 0\.11"):
        known("0.10.2")
    assert known("0.11.0").dialect == "vllm"


@pytest.mark.parametrize(("version", "refused"), [("0.22.1", True), ("0.28.0", True), ("0.30.0", False)])
def test_a_simple_cpu_connector_that_lies_is_refused(version: str, refused: bool) -> None:
    """Before 0.30 that connector announces host evictions as device removals, so no index can be right."""
    if refused:
        with pytest.raises(ConfigError, match="SimpleCPUOffloadConnector"):
            known(version, connector="simple_cpu")
    else:
        assert known(version, connector="simple_cpu").clear_scope == "device_then_host"


def test_an_unknown_setting_is_refused() -> None:
    """A mistyped field of the settings is an error, not a default."""
    with pytest.raises(msgspec.ValidationError, match="blocksize"):
        msgspec.convert({"blocksize": 16}, EngineSettings)


GROUPS = (Group(0, "full", 32), Group(1, "window", 16, 96))


def test_before_0_20_there_is_one_group_whatever_the_model_is() -> None:
    """With events on those versions run every layer as full attention."""
    assert known("0.19.1", groups=GROUPS, block_size=16).groups == (Group(0, "full", 16),)
    assert known("0.20.2", groups=GROUPS, block_size=16).groups == GROUPS
    assert (has_groups("0.19.1"), has_groups("0.20.2")) == (False, True)


def test_before_0_20_a_model_of_one_group_keeps_its_kind() -> None:
    """A model that has windows in every layer has one window group, which nothing switches off."""
    window = (Group(0, "window", 16, 96),)
    assert known("0.14.1", groups=window, block_size=16).groups == window


STATES = (Group(0, "full", 128), Group(1, "state", 128))
UNEQUAL = (Group(0, "full", 48), Group(1, "state", 640))
UNITS = [
    ("0.32.0", {}, 0, 0),  # learnt from the first store
    ("0.32.0", {"block_size": 16}, 16, 0),
    ("0.32.0", {"prefix_match_unit": 8}, 8, 8),  # of groups that are learnt
    ("0.32.0", {"groups": GROUPS}, 16, 0),  # the greatest common divisor
    ("0.32.0", {"groups": GROUPS, "prefix_match_unit": 8}, 8, 0),  # a window is never hit inside a block
    ("0.32.0", {"groups": STATES}, 128, 0),
    ("0.32.0", {"groups": STATES, "prefix_match_unit": 32}, 32, 32),
    ("0.26.0", {"groups": UNEQUAL}, 16, 16),  # hits inside blocks need no setting
    ("0.25.1", {"groups": UNEQUAL}, 16, 0),
    ("0.25.1", {"groups": STATES, "prefix_match_unit": 32}, 128, 0),
    ("0.28.0", {"groups": (Group(0, "full", 32),), "prefix_match_unit": 8}, 32, 0),  # ignored with one group
    ("0.28.0", {"groups": (*UNEQUAL, Group(2, "window", 16, 96))}, 16, 16),
    ("0.28.0", {"groups": (*UNEQUAL, Group(2, "window", 48, 96))}, 16, 0),
]


@pytest.mark.parametrize(("version", "settings", "unit", "alignment"), UNITS)
def test_the_unit_is_the_finest_size_at_which_the_cache_can_be_hit(
    version: str, settings: dict[str, Any], unit: int, alignment: int
) -> None:
    """The unit is the match unit, else what all groups' blocks have in common; hits end at it where states allow."""
    profile = known(version, **settings)
    assert (profile.unit, profile.alignment) == (unit, alignment)


def test_a_picture_has_a_place_in_its_block_from_0_19_on() -> None:
    """Extra keys name a picture alone up to 0.18, and say where in the block it begins in 0.19.1."""
    assert (places_media("0.18.1"), places_media("0.19.1")) == (False, True)


DRAFTING = [("0.12.0", "drop_unit"), ("0.28.0", "drop_unit"), ("0.32.0", "drop_unit_ahead")]


@pytest.mark.parametrize(("version", "drafting"), DRAFTING)
def test_eagle_takes_a_unit_and_looks_ahead_from_0_32_on(version: str, drafting: str) -> None:
    """Drafting is a property of the version; without a draft model nothing is dropped."""
    assert known(version, drafting="eagle").drafting == drafting
    assert known(version).drafting == "none"


HOSTS = [
    ("0.32.0", {}, TierProfile("host")),
    ("0.19.1", {"connector": "offloading"}, TierProfile("host", last_token="uncounted")),
    ("0.20.0", {"connector": "offloading"}, TierProfile("host", last_token="counted")),
    ("0.32.0", {"connector": "simple_cpu", "host_chunks": 9}, TierProfile("host", capacity=9, drafting=True)),
    ("0.23.0", {"connector": "offloading"}, TierProfile("host", last_token="counted")),
    (
        "0.32.0",
        {"connector": "offloading", "host_chunks": 20, "blocks_per_chunk": 3},
        TierProfile("host", chunk=3, capacity=20, last_token="counted", drafting=True),
    ),
]


@pytest.mark.parametrize(("version", "settings", "host"), HOSTS)
def test_the_host_tier_behaves_as_its_connector_does(version: str, settings: dict[str, Any], host: TierProfile) -> None:
    """Chunk, capacity and what a load may cover follow from connector and version."""
    assert known(version, **settings).tier("host") == host
    assert known(version, **settings).hash_only_stores is ("connector" in settings)


def test_a_clear_is_the_devices_unless_a_connector_speaks_too() -> None:
    """Without a connector, and with OffloadingConnector, a clear names the device only."""
    assert known("0.32.0").clear_scope == "device"
    assert known("0.32.0", connector="offloading").clear_scope == "device"


def test_a_file_system_tier_never_announces_removals() -> None:
    """Blocks on disk are stored and never taken back by an event."""
    assert known("0.32.0").tier("disk").removals is False


SEEDS = [
    ("0.28.0", {}, HashScheme()),
    ("0.29.0", {}, HashScheme(seed=DEFAULT_SEED)),
    ("0.30.0", {"hash_algorithm": "sha256_cbor"}, HashScheme("sha256_cbor", DEFAULT_SEED)),
    ("0.30.0", {"hash_algorithm": "xxhash"}, HashScheme("xxhash")),
    ("0.28.0", {"hash_seed": "0", "hash_bits": 256}, HashScheme("sha256", "0", 256)),
]


@pytest.mark.parametrize(("version", "settings", "scheme"), SEEDS)
def test_the_hash_seed_is_known_where_it_is_fixed(version: str, settings: dict[str, Any], scheme: HashScheme) -> None:
    """Up to 0.28 an unset seed is random; from 0.29 on it is a fixed text, except for xxhash."""
    assert known(version, **settings).hash == scheme


HIDDEN = [("0.12.0", ("salt",)), ("0.16.0", ("salt",)), ("0.17.0", ()), ("0.30.0", ()), ("0.31.0", ("adapter_path",))]


@pytest.mark.parametrize(("version", "hidden"), HIDDEN)
def test_each_version_hides_other_parts_of_the_namespace(version: str, hidden: tuple[str, ...]) -> None:
    """Salts are not announced up to 0.16, and an adapter's path is hashed but not announced from 0.31 on."""
    assert known(version).hidden_namespaces == hidden


def test_full_reports_announce_hits_again() -> None:
    """With kv_cache_report_mode=full a store may repeat a copy that is there."""
    assert known("0.32.0", report_mode_full=True).re_announces_hits
    assert not known("0.32.0").re_announces_hits
