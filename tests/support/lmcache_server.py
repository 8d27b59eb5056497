"""LMCache's multiprocess server as a subscriber sees it: a bounded log of records, and the gRPC stream that reads it.

The log follows modules/kv_events.py of lmcache 0.5.6 (KVEventModule); `tests/data/lmcache` has the real one's messages.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from ops.embedded.processes import LOOPBACK
from schemas.lmcache_mp import (
    PING,
    REMOVED,
    STORED,
    SUBSCRIBE,
    KVEventBatch,
    KVEventRecord,
    PingRequest,
    PingResponse,
    SubscribeKvEventsRequest,
)

_LOST = "lost"


def names_of(tokens: Sequence[int], chunk: int) -> list[bytes]:
    """Return a chained name for each whole chunk, 32 bytes as blake3's are."""
    names: list[bytes] = []
    for start in range(0, len(tokens) // chunk * chunk, chunk):
        before = names[-1] if names else b""
        part = b"".join(token.to_bytes(4, "big") for token in tokens[start : start + chunk])
        names.append(hashlib.blake2b(before + part, digest_size=32).digest())
    return names


class KvLog:
    """The records that a run of the server has kept."""

    def __init__(self, size: int, incarnation: int) -> None:
        self.incarnation = incarnation
        self.next = 1
        self._records: deque[Any] = deque(maxlen=size)

    def append(self, kind: str, model: str = "", **fields: Any) -> None:
        """Add a record under the next number; the oldest goes where there is no room."""
        medium = fields.pop("medium", "CPU")
        self._records.append(KVEventRecord(seq=self.next, kind=kind, medium=medium, model_name=model, **fields))
        self.next += 1

    def read(self, model: str, cursor: int, most: int) -> Any:
        """Return one batch of a model's records after the cursor."""
        last = self.next - 1
        first = self._records[0].seq if self._records else self.next
        lost = cursor + 1 < first or cursor > last
        position = min(cursor, last)
        records: list[Any] = []
        for record in self._records:
            if record.seq <= cursor:
                continue
            position = record.seq
            if record.kind == _LOST:
                lost, records = True, []
            elif record.model_name == model:
                records.append(record)
                if len(records) == most:
                    break
        return KVEventBatch(
            enabled=self._records.maxlen != 0,
            incarnation=self.incarnation,
            next_cursor=position,
            lost=lost,
            events=records,
        )


class LmcacheServer:
    """Speaks the real wire on a port that is its own over restarts; stores, evicts and fails as told."""

    def __init__(self, chunk: int = 256, log_size: int = 32768) -> None:
        self.chunk = chunk
        self.resident: dict[str, dict[bytes, None]] = {}  # by model
        self.cursors: list[int] = []  # that subscriptions began with
        self.pings = 0
        self.frozen = False  # connections are taken, nothing is answered
        self._log_size = log_size
        self._port = 0
        self._incarnation = time.time_ns()
        self._log = KvLog(log_size, self._incarnation)
        self._raw: deque[bytes] = deque()  # sent in place of the next batches
        self._news = asyncio.Event()
        self._streams: dict[int, asyncio.Event] = {}  # by instance: set to close it
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        """Where to subscribe."""
        return f"grpc://{LOOPBACK}:{self._port}"

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)])
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            SUBSCRIBE: grpc.unary_stream_rpc_method_handler(self._subscribe),
            PING: grpc.unary_unary_rpc_method_handler(self._ping),
        }
        for path, method in methods.items():
            service, name = path[1:].split("/")
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        self._port = self._server.add_insecure_port(f"{LOOPBACK}:{self._port}")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything."""
        await self.stop()

    async def stop(self) -> None:
        """Die; `restart`, or another entry for the same run, may follow."""
        if self._server is not None:
            server, self._server = self._server, None
            self.end_streams()
            await server.stop(0.1)

    async def restart(self, log_size: int | None = None) -> None:
        """Begin another run, empty, under the same address."""
        await self.stop()
        self._incarnation += 1
        self._log_size = self._log_size if log_size is None else log_size
        self._log = KvLog(self._log_size, self._incarnation)
        self.resident.clear()
        await self.__aenter__()

    # ---- what happens to the cache

    def store(self, model: str, tokens: Sequence[int]) -> list[bytes]:
        """Store the whole chunks of a prompt that are not there; return all their names."""
        held = self.resident.setdefault(model, {})
        names = names_of(tokens, self.chunk)
        for number, name in enumerate(names):
            if name not in held:
                held[name] = None
                part = tokens[number * self.chunk : (number + 1) * self.chunk]
                parent = names[number - 1] if number else None
                self._append(STORED, model, block_hashes=[name], parent_block_hash=parent, token_ids=part)
        return names

    def evict(self, model: str, *names: bytes) -> None:
        """Drop chunks."""
        for name in names:
            del self.resident[model][name]
        self._append(REMOVED, model, block_hashes=names)

    def lose(self) -> None:
        """Drop an event before it is recorded, which the log marks."""
        self._append(_LOST)

    def batch(self, model: str, cursor: int = 0) -> bytes:
        """Return what a subscription with this cursor would be sent first."""
        return bytes(self._log.read(model, cursor, 1024).SerializeToString())

    def found(self, model: str, tokens: Sequence[int]) -> int:
        """Return how many tokens a look-up finds: whole chunks from the start."""
        held = self.resident.get(model, {})
        names = names_of(tokens, self.chunk)
        return next((n for n, name in enumerate(names) if name not in held), len(names)) * self.chunk

    # ---- faults

    def send_instead(self, payload: bytes) -> None:
        """Send these bytes in place of a batch."""
        self._raw.append(payload)
        self._wake()

    def end_streams(self) -> None:
        """Close all subscriptions, as the server does with those that do not ping."""
        for closing in self._streams.values():
            closing.set()
        self._wake()

    # ---- the wire

    def _append(self, kind: str, model: str = "", **fields: Any) -> None:
        self._log.append(kind, model, **fields)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _subscribe(self, payload: bytes, context: Any) -> AsyncIterator[bytes]:
        request = SubscribeKvEventsRequest.FromString(payload)
        if request.cursor < 0 or not 0 < request.max_events <= 1024:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "cursor or max_events")
        if request.instance_id in self._streams:
            self._streams[request.instance_id].set()
            self._wake()
        closing = self._streams[request.instance_id] = asyncio.Event()
        self.cursors.append(request.cursor)
        cursor, first = request.cursor, True
        while not closing.is_set():
            news = self._news
            batch = self._log.read(request.model_name, cursor, request.max_events)
            cursor = batch.next_cursor
            if self.frozen:
                await news.wait()
            elif self._raw:
                yield self._raw.popleft()
            elif first or batch.events or batch.lost:
                yield batch.SerializeToString()
                if not batch.enabled:
                    return
                first = False
            else:
                await news.wait()

    async def _ping(self, payload: bytes, context: Any) -> bytes:
        assert PingRequest.FromString(payload).HasField("instance_id")
        self.pings += 1
        if self.frozen:
            await asyncio.Event().wait()
        return bytes(PingResponse(ok=True).SerializeToString())
