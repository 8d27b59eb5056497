"""What `kv.replicas` says now: the newest profile and life of every replica and pool."""

from collections.abc import Mapping
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, ProfileError
from schemas.profiles import ReplicaEntry, decode_entry
from schemas.topics import REPLICAS

log = structlog.get_logger()


async def read_entries(client: Mapping[str, Any]) -> dict[str, ReplicaEntry]:
    """Return entries by their key, a replica's name or pool@model; unreadable ones are logged and left out.

    Args:
        client: aiokafka's arguments to connect (ops/kafka_client.py).
    Raises:
        BrokerUnavailable: Kafka did not answer.
    """
    partition = TopicPartition(REPLICAS, 0)
    consumer = AIOKafkaConsumer(**client, enable_auto_commit=False, auto_offset_reset="earliest")
    entries: dict[str, ReplicaEntry] = {}
    try:
        await consumer.start()
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end = (await consumer.end_offsets([partition]))[partition]
        # the last offsets may hold markers or be compacted away: the position tells, no record need have them
        while await consumer.position(partition) < end:
            for record in (await consumer.getmany(partition, timeout_ms=1000)).get(partition, []):
                key = (record.key or b"").decode(errors="replace")
                entries.pop(key, None)
                try:
                    if record.value is not None:
                        entries[key] = decode_entry(record.value)
                except ProfileError as error:
                    log.warning("registry.entry_refused", key=key, offset=record.offset, error=str(error))
    except (KafkaError, OSError) as error:
        raise BrokerUnavailable(f"{REPLICAS}: {error!r}") from error
    finally:
        await consumer.stop()
    return entries
