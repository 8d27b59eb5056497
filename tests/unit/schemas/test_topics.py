"""Topic names: one slug per model, readable and collision-free."""

import re

import pytest

from schemas.topics import (
    CONTROL,
    DEAD_LETTERS,
    REPLICAS,
    SNAPSHOT_BANDS,
    decisions_topic,
    events_topic,
    model_slug,
    outcomes_topic,
    snapshots_topic,
    topic_specs,
)

# the 8 digits are the first of XXH3-64 over the name's UTF-8, computed once; changing them orphans every topic
SLUGS = {
    "Qwen/Qwen3-8B": "qwen-qwen3-8b-368f5a1c",
    "a": "a-e6c632b6",
    "A": "a-d0d496e0",
    "a/b": "a-b-48f71e94",
    "a-b": "a-b-f5e2d74c",
    "模型": "46268648",
    "x" * 60: "x" * 40 + "-50b95b29",
}


@pytest.mark.parametrize("model", SLUGS)
def test_the_slug_of_a_model_never_changes(model: str) -> None:
    """A model's slug is fixed for good, for topics and keys carry it."""
    assert model_slug(model) == SLUGS[model]


@pytest.mark.parametrize("model", ["{x}", "a b\n", "../..", "é" * 300, "a" * 500, ""])
def test_a_slug_is_a_legal_topic_part_whatever_the_model_is_called(model: str) -> None:
    """Braces, slashes, blanks and long names leave lower-case letters, digits and hyphens, at most 49 of them."""
    assert re.fullmatch(r"[a-z0-9-]{8,49}", model_slug(model))


def test_models_whose_names_read_alike_have_topics_of_their_own() -> None:
    """Names that differ only in what the readable part drops differ in the hash."""
    assert len({events_topic(model) for model in ("a/b", "a-b", "A/B", "a b")}) == 4


def test_every_topic_of_a_model_is_listed_once_with_its_policy() -> None:
    """The specs hold the three shared topics and four per model; pages are compacted in one partition a band."""
    specs = {spec.name: spec for spec in topic_specs(["m", "n"], 6)}
    assert len(specs) == 3 + 2 * 4
    assert specs[REPLICAS].config["cleanup.policy"] == "compact"
    assert specs[CONTROL].config["retention.ms"] == str(3_600_000)
    assert specs[DEAD_LETTERS].config["retention.ms"] == str(7 * 86_400_000)
    for model in ("m", "n"):
        assert specs[events_topic(model)].partitions == 6
        assert specs[decisions_topic(model)].partitions == specs[outcomes_topic(model)].partitions == 6
        assert specs[snapshots_topic(model)].partitions == SNAPSHOT_BANDS
        assert specs[snapshots_topic(model)].config == {"cleanup.policy": "compact"}
