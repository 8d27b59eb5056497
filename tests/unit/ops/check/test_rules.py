"""The conformance check on recordings: an engine is fit as itself and unfit as another version."""

import asyncio

import msgspec
import pytest

from ops.check.command import findings_of
from ops.check.expected import wire_of
from ops.check.observed import Observed
from ops.check.report import Finding, is_fit
from ops.check.rules import Seen, check
from relays.dialects import EngineSettings, profile_for
from relays.engine import EngineRank
from schemas.profiles import Holder
from tests.support.captures import short_recordings
from tests.support.payloads import array_stored, batch, map_removed, pack
from tests.support.vllm_frames import map_stored

RECORDINGS = short_recordings()


def findings_as(folder: object, version: str | None = None) -> dict[str, Finding]:
    from ops.replay.capture import load_capture

    capture = load_capture(folder)  # type: ignore[arg-type]
    if version is not None:
        capture = msgspec.structs.replace(capture, version=version)
    return {finding.rule: finding for finding in asyncio.run(findings_of(capture))}


def seen_of(version: str, *payloads: object, first: int = 0) -> Seen:
    profile = profile_for("vllm", "m", "r", version, EngineSettings())
    seen = Seen("vllm", version, wire_of("vllm", version), Observed(), EngineRank(profile, Holder("r", 0), 1))
    for sequence, payload in enumerate(payloads, start=first):
        seen.observed.take(sequence, pack(payload))
        seen.rank.take(sequence, pack(payload))
    return seen


def verdicts(seen: Seen) -> dict[str, str]:
    return {finding.rule: finding.verdict for finding in check(seen)}


@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda folder: folder.name)
def test_a_recorded_engine_is_fit_as_the_version_that_it_is(folder: object) -> None:
    """No rule stands against a recording under its own version."""
    findings = findings_as(folder)
    assert is_fit(findings.values()), [f for f in findings.values() if f.verdict == "unfit"]


@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("version", ["0.11.0", "0.24.0"])
def test_a_recorded_engine_is_unfit_as_another_version(folder: object, version: str) -> None:
    """Arrays and maps, the fields or the length of an event tell another version."""
    findings = findings_as(folder, version)
    own = findings_as(folder)
    if findings["encoding"].verdict == own["encoding"].verdict == "fit" and findings["fields"].verdict == "fit":
        pytest.skip("this recording's messages are ones that both versions send")
    assert not is_fit(findings.values())


def test_a_hole_in_the_sequence_is_unfit() -> None:
    """A skipped sequence is named with the number of messages missing."""
    seen = seen_of("0.32.0", batch(map_stored()))
    seen.observed.take(5, pack(batch(map_stored())))
    (finding,) = [finding for finding in check(seen) if finding.rule == "sequence"]
    assert (finding.verdict, "4 missing" in finding.text) == ("unfit", True)


def test_an_array_of_another_length_is_another_version() -> None:
    """0.12 sends seven items with its tag, 0.14 eight."""
    seven = array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU")
    assert verdicts(seen_of("0.12.0", batch(seven)))["fields"] == "fit"
    assert verdicts(seen_of("0.14.1", batch(seven)))["fields"] == "unfit"


SGLANG_ITEMS = [
    ("0.5.8", {6}, {2}),
    ("0.5.9", {6, 7}, {2, 3}),
    ("0.5.16", {6, 7}, {2, 3}),
    ("0.5.17", {7}, {3}),
    ("0.5.19", {7, 8}, {3}),
]


@pytest.mark.parametrize(("version", "stored", "removed"), SGLANG_ITEMS)
def test_sglangs_arrays_have_their_versions_lengths(version: str, stored: set[int], removed: set[int]) -> None:
    """With its tag; another length is another version, or vLLM."""
    wire = wire_of("sglang", version)
    assert wire is not None
    assert {event: set(range(fewest, most + 1)) for event, (fewest, most) in wire.items.items()} == {
        "BlockStored": stored,
        "BlockRemoved": removed,
    }


def test_a_field_that_nobody_knows_is_noted_and_passed_over() -> None:
    """A key of a later release does not make an engine unfit."""
    found = verdicts(seen_of("0.32.0", batch({**map_stored(), "brand_new": 1})))
    assert found["fields"] == "note"
    assert found["events"] == "fit"


def test_a_parent_that_was_never_announced_is_unfit_when_nothing_was_missed() -> None:
    """From the first message on an unknown parent is the engine's fault; for a late listener it is not."""
    child = batch(map_stored(parent_block_hash=99))
    assert verdicts(seen_of("0.32.0", child))["parents"] == "unfit"
    assert verdicts(seen_of("0.32.0", child, first=70))["parents"] == "note"


def test_a_tier_that_nobody_knows_is_unfit() -> None:
    """An unknown medium is never taken for the GPU, and says so."""
    assert verdicts(seen_of("0.32.0", batch(map_stored(medium="VRAM2"))))["tiers"] == "unfit"


def test_a_removal_of_an_unknown_copy_is_noted() -> None:
    """A removed block that nobody stored may be a late listener's, or a wrong count."""
    assert verdicts(seen_of("0.32.0", batch(map_stored(), map_removed(block_hashes=[77]))))["copies"] == "note"


def test_the_engines_own_word_decides_about_its_version() -> None:
    """What the API says is compared with what was given."""
    seen = seen_of("0.32.0", batch(map_stored()))
    seen.engine_version = "0.28.0"
    assert verdicts(seen)["version"] == "unfit"
    seen.engine_version = "0.32.0+cpu"
    assert verdicts(seen)["version"] == "fit"


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", pack([1.0]), pack([1.0, 7, None]), pack([1.0, [7], None])])
def test_hostile_messages_are_counted_and_raise_nothing(payload: bytes) -> None:
    """Whatever a socket delivers, the observer looks at it and goes on."""
    observed = Observed()
    observed.take(0, payload)
    assert observed.messages == 1
    assert observed.unreadable + sum(observed.events.values()) >= 1


def test_nothing_seen_is_not_fit() -> None:
    """A silent engine has not passed."""
    assert not is_fit(check(seen_of("0.32.0")))
