"""Decoder of LMCache's multiprocess server: a batch of its gRPC stream in, engine events out; pure.

A pool's blocks are LMCache's chunks: 256 tokens unless the server says otherwise, named by 32 bytes of blake3. A store
carries its chunk's tokens and the name of the chunk before, so places are known without any replica. The name of a
chunk is the same for every salt, adapter and parallel layout, and events say nothing of these.

Source: lmcache 0.5.6, v1/multiprocess/modules/kv_events.py (records), modules/lmcache_driven_transfer.py (tokens and
parents), token_hasher.py (names), distributed/l1_manager.py (what is announced); engines/other-engines.md 3.2.
"""

import msgspec

from relays.batches import Refused, check_tokens, read_hash, read_hashes, read_payload
from relays.engine_events import Decoded, EngineEvent, Reject, RejectReason, Removed, Stored
from schemas.errors import ConfigError, FrameError
from schemas.events import MAX_NUMBER
from schemas.lmcache_mp import REMOVED, STORED, EventRecord, read_batch
from schemas.profiles import Group, HashScheme, Profile, Tier, TierProfile

TIERS: dict[str, Tier] = {"CPU": "host"}
"""By medium; the server's disks and remote stores say nothing."""

CHUNK = 256
"""Tokens; `--chunk-size` of the server."""

MAX_BATCH_BYTES = 64 << 20  # a clear is one removal of everything, 34 bytes a chunk
_MAX_TOKEN = (1 << 63) - 1
_NAME_BITS = 256  # names are kept whole


class KvBatch(msgspec.Struct, frozen=True):
    """One batch of the stream, and what it says of the stream itself."""

    enabled: bool  # False: the server keeps no log
    incarnation: int  # of the server's process
    lost: bool  # what was announced before is void
    decoded: Decoded  # its sequence is the next cursor


def decode_lmcache(payload: bytes, model: str, chunk: int, time_s: float) -> KvBatch:
    """Return what a batch says of one model.

    Args:
        model: the server's name of it, for which the stream was asked.
        chunk: tokens.
        time_s: of its arrival, epoch; the events have no clock.
    Raises:
        FrameError: the message is no batch, or its records are not in order; nothing of it can be used.
    """
    batch = read_payload(payload, read_batch, lambda batch: batch.events, most_bytes=MAX_BATCH_BYTES)
    if not 0 <= batch.next_cursor <= MAX_NUMBER:
        raise FrameError("sequence", f"next_cursor: {batch.next_cursor}")
    events: list[EngineEvent] = []
    rejects: list[Reject] = []
    last = 0
    for position, record in enumerate(batch.events):
        if not last < record.seq <= batch.next_cursor:
            raise FrameError("sequence", f"events[{position}].seq: {record.seq} after {last}, to {batch.next_cursor}")
        last = record.seq
        try:
            events.append(_event(record, model, chunk))
        except Refused as refused:
            rejects.append(Reject(refused.reason, position, refused.detail))
    decoded = Decoded(batch.next_cursor, time_s, None, tuple(events), tuple(rejects))
    return KvBatch(batch.enabled, batch.incarnation, batch.lost, decoded)


def lmcache_profile(model: str, name: str, chunk: int = CHUNK) -> Profile:
    """Return the profile of one model's part of a server's memory.

    A chunk is one object for each worker of the replica (and object group), all of one name. The records of a write, or
    of an eviction, name a chunk once for however many of its objects, so copies cannot be counted: any removal leaves a
    chunk that is not whole, and ends it. A replica's look-up begins at the prompt's start, whatever its device holds,
    and stops at the first chunk that is missing; of a prompt that is there to its end the last token is computed again.

    Source: kv_events.py (_record_kv_event), distributed/api.py (ObjectKey), modules/lookup.py (lookup);
    integration/vllm/lmcache_mp_connector.py (get_num_new_matched_tokens).
    """
    if chunk < 1:
        raise ConfigError(f"chunk: {chunk} tokens")
    return Profile(
        model=model,
        name=name,
        engine="lmcache",
        version="",
        dialect="lmcache_mp",
        unit=chunk,
        alignment=chunk,
        groups=(Group(0, "full", chunk),),
        tiers=(TierProfile("host", last_token="uncounted"),),
        removal="one_for_copies",
        lookup_from_start=True,
        hidden_namespaces=("salt", "adapter"),
        marks=("namespaces_unchecked",),  # a chunk that only a salted prompt stored is credited to plain ones
        hash=HashScheme("blake3", None, _NAME_BITS),
    )


def _event(record: EventRecord, model: str, chunk: int) -> EngineEvent:
    if record.model_name != model:
        raise Refused(RejectReason.OTHER_SOURCE, f"model_name: {record.model_name[:80]!r}, asked for {model!r}")
    if record.kind not in (STORED, REMOVED):
        raise Refused(RejectReason.UNKNOWN_EVENT, f"kind: {record.kind[:80]!r}")
    hashes = read_hashes(record.block_hashes, _NAME_BITS)
    if not hashes:
        raise Refused(RejectReason.HASH, "block_hashes: none")
    tier = TIERS.get(record.medium, "other")
    if record.kind == REMOVED:
        return Removed(hashes=hashes, tier=tier)
    tokens = list(record.token_ids)
    check_tokens(tokens, chunk, len(hashes), _MAX_TOKEN, masked=False)
    parent = None
    if record.HasField("parent_block_hash"):
        parent = read_hash(record.parent_block_hash, _NAME_BITS, "parent_block_hash")
    return Stored(hashes=hashes, parent=parent, tokens=tokens, block_size=chunk, tier=tier)
