"""A simulated Mooncake master as a process: one socket on which it is asked, one on which it publishes."""

import asyncio
import time

import structlog
import zmq
import zmq.asyncio

from ops.simulator.mooncake.master import Master
from ops.simulator.mooncake.settings import MasterSettings
from ops.simulator.mooncake.wire import Question, decode_question, encode_batches
from ops.simulator.publisher import bind
from schemas.errors import BadRequest, ConfigError

_EVICT_EVERY_S = 0.05  # Mooncake: 0.01
_HIGH_WATER = 10_000  # messages for each subscriber; more are dropped silently

log = structlog.get_logger()


async def run_master(settings: MasterSettings) -> None:
    """Serve until cancelled; both ports are bound before the first await.

    Raises:
        ConfigError: a setting cannot be used, or a port is taken.
    """
    settings.check()
    server = MasterServer(settings)
    log.info("simulator.started", store=settings.name, objects=settings.objects)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.answer())
            tasks.create_task(server.evict())
    finally:
        server.close()


class MasterServer:
    """Owns a master and its sockets; messages are numbered from 1, and nothing is said twice."""

    def __init__(self, settings: MasterSettings) -> None:
        self._name = settings.name
        self._master = Master(
            settings.objects,
            settings.default_kv_lease_ttl / 1000,
            settings.eviction_high_watermark_ratio,
            settings.eviction_ratio,
        )
        self._sequence = 0
        self._told = 0  # events
        self._context = zmq.asyncio.Context()
        self._questions = self._context.socket(zmq.REP)
        self._publications = self._context.socket(zmq.PUB)
        self._publications.set_hwm(_HIGH_WATER)
        try:
            bind(self._questions, "rpc_port", settings.host, settings.rpc_port)
            bind(self._publications, "events_port", settings.host, settings.events_port)
        except ConfigError:
            self.close()
            raise

    async def answer(self) -> None:
        """Answer engines, one at a time, until cancelled; what is no question gets an empty answer."""
        while True:
            body = await self._questions.recv()
            try:
                found = self._found(decode_question(body))
            except BadRequest as error:
                log.warning("simulator.question_refused", store=self._name, error=str(error))
                found = []
            await self._questions.send(bytes(found))
            await self._publish()

    async def evict(self) -> None:
        """Make room where it is short, until cancelled."""
        while True:
            await asyncio.sleep(_EVICT_EVERY_S)
            if self._master.evict(time.monotonic()):
                await self._publish()

    def close(self) -> None:
        """Close both sockets and drop what is not sent."""
        self._context.destroy(linger=0)

    def _found(self, question: Question) -> list[bool]:
        ask = self._master.exist if question.verb == "exist" else self._master.put
        return ask(question.keys, time.monotonic())

    async def _publish(self) -> None:
        changes = self._master.take_changes()
        first, self._told = self._told + 1, self._told + len(changes)
        for payload in encode_batches(changes, self._name, first, int(time.time() * 1000)):
            self._sequence += 1
            await self._publications.send_multipart((b"", self._sequence.to_bytes(8, "big"), payload))
