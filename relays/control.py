"""Requests to tell everything again (`kv.control`), as a relay reads them."""

from collections.abc import Callable, Mapping
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.control import Resync, decode_control
from schemas.errors import BrokerUnavailable, FrameError
from schemas.topics import CONTROL

log = structlog.get_logger()


async def follow_control(client: Mapping[str, Any], on_resync: Callable[[Resync], None]) -> None:
    """Call back for every request written from now on, until cancelled.

    Raises:
        BrokerUnavailable: Kafka did not answer at the start.
    """
    partition = TopicPartition(CONTROL, 0)
    consumer = AIOKafkaConsumer(**client, enable_auto_commit=False, auto_offset_reset="latest")
    try:
        await consumer.start()
        consumer.assign([partition])
        await consumer.seek_to_end(partition)
        async for record in consumer:
            try:
                on_resync(decode_control(record.value or b""))
            except FrameError as error:
                log.warning("relay.control_refused", offset=record.offset, reason=error.reason, detail=error.detail)
    except (KafkaError, OSError) as error:
        raise BrokerUnavailable(f"{CONTROL}: {error!r}") from error
    finally:
        await consumer.stop()
