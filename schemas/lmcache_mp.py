"""LMCache's multiprocess server: the gRPC messages of its KV event stream, and of the ping that keeps it open.

Source: lmcache 0.5.6, v1/multiprocess/transport/grpc_impl/protos/{observability,controller}_service.proto and
modules/kv_events.py, modules/management.py; engines/other-engines.md 3.2. 0.5.5 has no such stream. A server offers
gRPC with `--transport grpc` only (the default is zmq), and records events unless `--kv-event-log-size 0` or
`--disable-observability` says otherwise.

`lmcache_mp.proto` says the same in protobuf's language. The messages live in a descriptor pool of their own, so that
they never meet LMCache's in one process.

| message | number: field | type | what |
| --- | --- | --- | --- |
| SubscribeKvEventsRequest | 1: instance_id | int64 | the subscriber; another subscription of it closes the first |
| | 2: model_name | string | exactly one; the server's name, decorated where context parallelism is on |
| | 3: cursor | int64 | records after it; 0: from the log's beginning. Above the last: none of the old, and `lost` |
| | 4: max_events | int64 | 1 to 1024 records a batch |
| KVEventBatch | 1: enabled | bool | false: no log is kept, and the stream ends |
| | 2: incarnation | int64 | nanoseconds since 1970 at the server's start |
| | 3: next_cursor | int64 | of the next subscription; counts the records of all models |
| | 4: lost | bool | records before these events are missing: what was announced is to be withdrawn |
| | 5: events | KVEventRecord | those after the loss, in order |
| KVEventRecord | 1: seq | int64 | from 1 for each incarnation; other models' records take numbers too |
| | 2: kind | string | stored, removed |
| | 3: medium | string | CPU: the server's own memory; nothing else is announced |
| | 4: model_name | string | as asked |
| | 5: block_hashes | bytes | of chunks; one in a store, any number in a removal |
| | 6: parent_block_hash | optional bytes | of the chunk before; absent in a removal, and where a prompt begins |
| | 7: token_ids | int64 | of the stored chunk, all of them; empty in a removal |
| PingRequest | 1: instance_id | optional int64 | a subscription without pings is closed, by default after 120 s |
| PingResponse | 1: ok | bool | always true |

Absent fields have their type's zero, as everywhere in proto3; unknown ones are ignored.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from schemas.errors import FrameError

SUBSCRIBE = "/lmcache.mp.ObservabilityService/SubscribeKvEvents"
PING = "/lmcache.mp.ControllerService/Ping"

MOST_EVENTS = 1024
"""Records a batch may have, by the server's own check."""

STORED, REMOVED = "stored", "removed"

PACKAGE = "lmcache.mp"
FIELDS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "SubscribeKvEventsRequest": (
        ("int64", "instance_id", 1),
        ("string", "model_name", 2),
        ("int64", "cursor", 3),
        ("int64", "max_events", 4),
    ),
    "KVEventRecord": (
        ("int64", "seq", 1),
        ("string", "kind", 2),
        ("string", "medium", 3),
        ("string", "model_name", 4),
        ("repeated bytes", "block_hashes", 5),
        ("optional bytes", "parent_block_hash", 6),
        ("repeated int64", "token_ids", 7),
    ),
    "KVEventBatch": (
        ("bool", "enabled", 1),
        ("int64", "incarnation", 2),
        ("int64", "next_cursor", 3),
        ("bool", "lost", 4),
        ("repeated KVEventRecord", "events", 5),
    ),
    "PingRequest": (("optional int64", "instance_id", 1),),
    "PingResponse": (("bool", "ok", 1),),
}
"""Each message's fields: type, name, number."""


class EventRecord(Protocol):
    """A `KVEventRecord`."""

    seq: int
    kind: str
    medium: str
    model_name: str
    block_hashes: Sequence[bytes]
    parent_block_hash: bytes
    token_ids: Sequence[int]

    def HasField(self, field_name: str) -> bool:
        """Return whether an optional field was sent."""


class EventBatch(Protocol):
    """A `KVEventBatch`."""

    enabled: bool
    incarnation: int
    next_cursor: int
    lost: bool
    events: Sequence[EventRecord]


def read_batch(payload: bytes) -> EventBatch:
    """Return the batch in a message of the stream.

    Raises:
        FrameError: the bytes are no such message.
    """
    batch = KVEventBatch()
    try:
        batch.ParseFromString(payload)
    except DecodeError as error:
        raise FrameError("batch_malformed", str(error)[:200]) from error
    return cast("EventBatch", batch)


def encode_subscribe(instance_id: int, model_name: str, cursor: int, max_events: int = MOST_EVENTS) -> bytes:
    """Return the request for one model's records after a cursor."""
    request = SubscribeKvEventsRequest(
        instance_id=instance_id, model_name=model_name, cursor=cursor, max_events=max_events
    )
    return bytes(request.SerializeToString())


def encode_ping(instance_id: int) -> bytes:
    """Return the request that keeps a subscription open."""
    return bytes(PingRequest(instance_id=instance_id).SerializeToString())


def _message_classes() -> list[Any]:
    file = descriptor_pb2.FileDescriptorProto(name="schemas/lmcache_mp.proto", package=PACKAGE, syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for kind, field_name, number in fields:
            _add_field(message, kind, field_name, number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in FIELDS]


def _add_field(message: descriptor_pb2.DescriptorProto, kind: str, name: str, number: int) -> None:
    label, _, scalar = kind.rpartition(" ")
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if label == "repeated" else field.LABEL_OPTIONAL
    if scalar in FIELDS:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{scalar}"
    else:
        field.type = field.Type.Value(f"TYPE_{scalar.upper()}")
    if label == "optional":  # proto3 tells a field that was sent by a oneof with a single member
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


SubscribeKvEventsRequest, KVEventRecord, KVEventBatch, PingRequest, PingResponse = _message_classes()
