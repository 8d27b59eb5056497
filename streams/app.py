"""The Faust application of a worker; importing this opens nothing and touches no event loop."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faust

from ops.kafka_client import ssl_context
from ops.settings import Settings
from schemas.topics import MAX_LETTER_BYTES
from streams.agents import declare_agent
from streams.folding import Folder
from streams.transport import LoadCursors, OnBack, OnRange, guard


def build_app(
    settings: Settings, folders: dict[str, Folder], load_cursors: LoadCursors, on_range: OnRange, on_back: OnBack
) -> faust.App:
    """Return the app with one agent a topic.

    Args:
        folders: topic -> what folds it.

    The settings were measured (streams/README.md): raw bytes, no leader topic, an empty-stream wait at shutdown, and
    Kafka's commits as a mere hint, for a start reads on at the store's cursors.
    """
    brokers: Sequence[str] = [f"kafka://{address}" for address in settings.kafka_brokers.split(",")]
    app = faust.App(
        settings.worker_group,
        broker=";".join(brokers),
        broker_credentials=_credentials(settings),
        autodiscover=False,
        datadir=str(Path(tempfile.gettempdir()) / "kvatlas-faust"),  # made at the start, never written: no tables
        key_serializer="raw",
        value_serializer="raw",
        topic_disable_leader=True,
        topic_allow_declare=False,
        topic_partitions=settings.partitions,
        processing_guarantee="at_least_once",
        stream_wait_empty=True,
        broker_commit_interval=1.0,
        broker_commit_every=10_000,
        broker_session_timeout=settings.worker_session_timeout_s,
        broker_heartbeat_interval=1.0,
        consumer_auto_offset_reset="earliest",
        consumer_metadata_max_age_ms=30_000,
        producer_max_request_size=MAX_LETTER_BYTES,
        web_enabled=False,
    )
    guard(app, load_cursors, on_range, on_back)
    for topic, folder in folders.items():
        declare_agent(app, topic, folder, settings.worker_take, settings.worker_take_within_s)
    return app


def _credentials(settings: Settings) -> Any:
    security = settings.security
    if security.sasl:
        return faust.SASLCredentials(
            username=security.username,
            password=security.password,
            mechanism=security.mechanism,
            ssl_context=ssl_context(security),
        )
    return faust.SSLCredentials(context=ssl_context(security)) if security.tls else None
