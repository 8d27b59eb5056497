"""Topic names, their partitions and settings; a model is a slug of its name plus 8 hex digits of its hash."""

import re
from dataclasses import dataclass, field

import xxhash

SNAPSHOT_BANDS = 8
"""Partitions of a snapshot topic: partition = depth band, so that shallow blocks can be read first."""

_DAY_MS = 86_400_000


def model_slug(model: str) -> str:
    """Return the model's name as topics and keys carry it; equal names give equal slugs, others other ones."""
    readable = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:40]
    digest = xxhash.xxh3_64_hexdigest(model.encode())[:8]
    return f"{readable}-{digest}" if readable else digest


def events_topic(model: str) -> str:
    """Return the topic that carries a model's normalized events, keyed by replica or pool."""
    return f"kv.events.{model_slug(model)}"


def snapshots_topic(model: str) -> str:
    """Return the compacted topic with pages of the relays' mirrors, partitioned by depth band."""
    return f"kv.snapshots.{model_slug(model)}"


def decisions_topic(model: str) -> str:
    """Return the topic with what was priced and credited, keyed by request."""
    return f"kv.decisions.{model_slug(model)}"


def outcomes_topic(model: str) -> str:
    """Return the topic with what engines reported, keyed by request."""
    return f"kv.outcomes.{model_slug(model)}"


REPLICAS = "kv.replicas"
CONTROL = "kv.control"
DEAD_LETTERS = "kv.dead-letters"
MAX_LETTER_BYTES = 2 << 20
"""Of a dead letter: the largest record that another topic takes, and what is said about it."""


@dataclass(frozen=True)
class TopicSpec:
    """How a topic must exist."""

    name: str
    partitions: int
    config: dict[str, str] = field(default_factory=dict)


def topic_specs(models: list[str], partitions: int) -> list[TopicSpec]:
    """Return every topic of these models, with `partitions` for those that are keyed by replica or request."""
    specs = [
        TopicSpec(REPLICAS, 1, {"cleanup.policy": "compact"}),
        TopicSpec(CONTROL, 1, {"cleanup.policy": "delete", "retention.ms": str(_DAY_MS // 24)}),
        TopicSpec(
            DEAD_LETTERS,
            1,
            {
                "cleanup.policy": "delete",
                "retention.ms": str(7 * _DAY_MS),
                "max.message.bytes": str(MAX_LETTER_BYTES),
            },
        ),
    ]
    day = {"cleanup.policy": "delete", "retention.ms": str(_DAY_MS)}
    for model in models:
        specs += [
            TopicSpec(events_topic(model), partitions, day),
            TopicSpec(snapshots_topic(model), SNAPSHOT_BANDS, {"cleanup.policy": "compact"}),
            TopicSpec(decisions_topic(model), partitions, day),
            TopicSpec(outcomes_topic(model), partitions, day),
        ]
    return specs
