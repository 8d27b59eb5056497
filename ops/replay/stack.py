"""A replay through the whole running stack: recorded frames go out on a real socket, answers come over HTTP."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from index.lookup import Prompt
from index.match import Reach
from ops.embedded.processes import LOOPBACK, free_ports
from ops.replay.capture import MODEL, Capture
from ops.replay.recordings import settings_of
from ops.stack import RouterClient, Stack
from relays.sockets import END_MARK

_TOPIC = b"kv@replay"
_NO_TOKEN = (1 << 31) - 1


class Player:
    """An engine's two sockets, fed from a recording: what was played can be replayed."""

    def __init__(self) -> None:
        publish, replay = free_ports(2)
        self.events = f"tcp://{LOOPBACK}:{publish}"
        self.replay = f"tcp://{LOOPBACK}:{replay}"
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._ring: dict[int, bytes] = {}
        self._answering: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Open the sockets."""
        self._publisher.sndhwm = self._router.sndhwm = 0
        self._publisher.bind(self.events)
        self._router.bind(self.replay)
        self._answering = asyncio.create_task(self._answer())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets."""
        if self._answering is not None:
            self._answering.cancel()
            with suppress(asyncio.CancelledError):
                await self._answering
        self._context.destroy(linger=0)

    async def play(self, sequence: int, payload: bytes) -> None:
        """Publish one message."""
        self._ring[sequence] = payload
        await self._publisher.send_multipart([_TOPIC, sequence.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            identity, empty, start = await self._router.recv_multipart()
            for sequence, payload in sorted(self._ring.items()):
                if sequence >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([identity, empty, _TOPIC, sequence.to_bytes(8, "big"), payload])
            await self._router.send_multipart([identity, empty, b"", END_MARK.to_bytes(8, "big"), b""])


class ThroughStack:
    """One recording's way through relay, Kafka, worker, Redis and router."""

    def __init__(self, capture: Capture, stack: Stack, client: RouterClient) -> None:
        self._capture = capture
        self._stack = stack
        self._client = client
        self._player = Player()
        self._exit = AsyncExitStack()
        self._last = -1
        self._applied = -1

    async def __aenter__(self) -> Self:
        """Start the recording's relay."""
        await self._exit.enter_async_context(self._player)
        name = f"relay-{self._capture.name}"
        self._stack.start_relay(self._arguments(), name)
        self._exit.push_async_callback(self._stack.stop_part, name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the relay."""
        await self._exit.aclose()

    async def take(self, sequence: int, payload: bytes) -> None:
        """Publish one message."""
        await self._player.play(sequence, payload)
        self._last = sequence

    async def predict(self, prompt: Prompt, *, whole_prompt: bool = False) -> Reach:
        """Return the router's answer, once all that was published is in the index."""
        if self._applied < self._last:
            await self._client.wait_applied(MODEL, f"{self._capture.name}/{self._capture.rank}", self._last)
            self._applied = self._last
        body = _body(prompt, self._capture.name)
        if whole_prompt:
            body["token_ids"].append(_NO_TOKEN)  # the limit of one token less then falls on this one
        answer = await self._client.price(body)
        (replica,) = answer["replicas"]
        by_tier = {tier: tokens for tier, tokens in replica["cached_tokens"].items() if tokens}
        return Reach(replica["reusable_tokens"], by_tier, replica["upper_bound"])

    def _arguments(self) -> list[str]:
        settings = msgspec.to_builtins(settings_of(self._capture))
        defaults = msgspec.to_builtins(type(settings_of(self._capture))())
        facts = {name: value for name, value in settings.items() if value != defaults[name]}
        arguments = ["--model", MODEL, "--replica", self._capture.name, "--engine", self._capture.engine]
        arguments += ["--engine-version", self._capture.version]
        arguments += ["--rank", str(self._capture.rank)]
        arguments += ["--events", self._player.events, "--replay", self._player.replay, "--topic", _TOPIC.decode()]
        for name, value in facts.items():
            arguments += ["--set", f"{name}={json.dumps(value)}"]
        return arguments


def _body(prompt: Prompt, replica: str) -> dict[str, Any]:
    assert prompt.tokens is not None  # recordings hold tokens
    tokens = memoryview(prompt.tokens.data).cast("Q" if prompt.tokens.wide else "I").tolist()
    return {
        "model": prompt.model,
        "token_ids": tokens,
        "adapter": prompt.adapter,
        "cache_salt": prompt.salt,
        "media": [{"id": m.id, "offset": m.offset, "length": m.length} for m in prompt.media],
        "replicas": [replica],
    }
