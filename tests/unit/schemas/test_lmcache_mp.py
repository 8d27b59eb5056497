"""The wire messages of LMCache's multiprocess server."""

import re
from pathlib import Path

from schemas import lmcache_mp
from schemas.lmcache_mp import FIELDS, PING, SUBSCRIBE, KVEventBatch, encode_ping, encode_subscribe, read_batch
from tests.support.lmcache_frames import frames

PROTO = Path(lmcache_mp.__file__).with_suffix(".proto").read_text()


def test_the_proto_file_says_what_the_module_builds() -> None:
    """Messages, field types, names and numbers are the same in both, and so are the paths of the methods."""
    messages = dict(re.findall(r"message (\w+) \{\n(.*?)\n?\}", PROTO, re.DOTALL))
    field = re.compile(r"  ((?:repeated |optional )?\w+) (\w+) = (\d+);")
    read = {
        name: tuple((kind, label, int(number)) for kind, label, number in field.findall(body))
        for name, body in messages.items()
    }
    assert read == FIELDS
    package = re.findall(r"package (.*);", PROTO)[0]
    services = re.findall(r"service (\w+) \{\n  rpc (\w+)\(", PROTO)
    assert [f"/{package}.{service}/{method}" for service, method in services] == [SUBSCRIBE, PING]


def test_a_recorded_message_is_written_again_byte_by_byte() -> None:
    """The real server's messages hold no field that is unknown here, and none of another type."""
    for payload in frames("plain", "tp2", "lives"):
        batch = KVEventBatch.FromString(payload)
        batch.DiscardUnknownFields()
        assert batch.SerializeToString(deterministic=True) == payload


def test_an_absent_parent_is_told_from_an_empty_one() -> None:
    """Only presence says that a prompt begins here."""
    batch = KVEventBatch(events=[{"seq": 1}, {"seq": 2, "parent_block_hash": b""}])
    records = read_batch(batch.SerializeToString()).events
    assert [record.HasField("parent_block_hash") for record in records] == [False, True]


def test_requests_are_as_the_servers_own_client_writes_them() -> None:
    """The bytes were written by LMCache's generated classes."""
    assert encode_subscribe(7, "tiny", 300, 1024).hex() == "0807120474696e7918ac02208008"
    assert encode_ping(7).hex() == "0807"
    assert encode_ping(0).hex() == "0800"  # of instance 0, not of nobody
