"""Metadata v12 (Kafka 3.0 and later), which tells topic ids; aiokafka's own requests end at v5, which does not.

Source: MetadataRequest.json and MetadataResponse.json of Kafka 4.3. Every field is always there; tagged fields, of
which v12 has none of its own, are skipped.
"""

from collections.abc import Iterable
from io import BytesIO
from typing import Any

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields


class _Uuid(AbstractType):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class TopicsResponse(Response):
    """What the broker says of each topic: `topics`, in the order of the fields below."""

    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString()),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),  # -1: none
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _TopicsRequestV12(RequestStruct):
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = TopicsResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("name", CompactString()), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicsRequest(Request[_TopicsRequestV12]):
    """Asks for topics by their names; asking never creates one."""

    API_KEY = 3

    def __init__(self, names: Iterable[str]) -> None:
        self._topics: list[Any] = [(bytes(16), name, {}) for name in sorted(names)]

    def build(self, request_struct_class: type[_TopicsRequestV12]) -> _TopicsRequestV12:
        """Return the request in the one version that is spoken here."""
        return request_struct_class(self._topics, False, False, {})
