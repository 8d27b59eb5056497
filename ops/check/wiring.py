"""What Kafka shows of a deployment: which relays speak now."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, FrameError
from schemas.events import Heartbeat, decode_record
from schemas.profiles import Holder
from schemas.topics import events_topic


async def heartbeats(client: Mapping[str, Any], model: str, seconds: float) -> dict[Holder, Heartbeat]:
    """Return the last heartbeat of each holder that beats within some seconds from now.

    Raises:
        BrokerUnavailable: Kafka did not answer.
    """
    topic = events_topic(model)
    beats: dict[Holder, Heartbeat] = {}
    consumer = AIOKafkaConsumer(**client, enable_auto_commit=False, auto_offset_reset="latest")
    try:
        await consumer.start()
        # a consumer without a group knows partitions of the topics that it has asked for
        await consumer._client.add_topic(topic)
        partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())]
        consumer.assign(partitions)
        await consumer.seek_to_end(*partitions)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            for records in (await consumer.getmany(timeout_ms=int(min(left_s, 0.5) * 1000))).values():
                for record in records:
                    beats.update(_beats(record.value or b""))
            await asyncio.sleep(0)
    except (KafkaError, OSError) as error:
        raise BrokerUnavailable(f"{topic}: {error!r}") from error
    finally:
        await consumer.stop()
    return beats


def _beats(value: bytes) -> dict[Holder, Heartbeat]:
    try:
        record = decode_record(value)
    except FrameError:
        return {}
    return {Holder(record.name, record.rank): event for event in record.events if isinstance(event, Heartbeat)}
