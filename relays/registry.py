"""What a relay reads from Kafka: the last life of its replica, and requests to tell everything again."""

from collections.abc import Callable, Mapping
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.control import Resync, decode_control
from schemas.errors import BrokerUnavailable, FrameError, ProfileError
from schemas.profiles import decode_entry
from schemas.topics import CONTROL, REPLICAS

log = structlog.get_logger()


async def last_life(client: Mapping[str, Any], replica: str) -> int:
    """Return the highest life that `kv.replicas` knows of this replica, 0 where it knows none.

    Raises:
        BrokerUnavailable: Kafka did not answer.
    """
    partition = TopicPartition(REPLICAS, 0)
    consumer = AIOKafkaConsumer(**client, enable_auto_commit=False, auto_offset_reset="earliest")
    life = 0
    try:
        await consumer.start()
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end = (await consumer.end_offsets([partition]))[partition]
        # the last offsets may hold markers or be compacted away: the position tells, no record need have them
        while await consumer.position(partition) < end:
            for record in (await consumer.getmany(partition, timeout_ms=1000)).get(partition, []):
                if record.key == replica.encode() and record.value is not None:
                    life = max(life, _life_of(record.value))
    except (KafkaError, OSError) as error:
        raise BrokerUnavailable(f"{REPLICAS}: {type(error).__name__}: {error}") from error
    finally:
        await consumer.stop()
    return life


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
        raise BrokerUnavailable(f"{CONTROL}: {type(error).__name__}: {error}") from error
    finally:
        await consumer.stop()


def _life_of(value: bytes) -> int:
    try:
        return decode_entry(value).life
    except ProfileError as error:
        log.warning("relay.entry_refused", error=str(error))
        return 0
