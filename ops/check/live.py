"""Listening to a live engine: everything that its sockets say, and probe prompts with predictions beside them."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from index.hashing import pack_tokens
from index.lookup import Prompt
from ops.check.expected import wire_of
from ops.check.observed import Observed
from ops.check.probes import EngineApi, Probe, probes
from ops.check.recorder import Recorder
from ops.check.report import Finding
from ops.check.rules import Seen, check
from ops.replay.pipeline import InProcess
from relays.dialects import EngineSettings, profile_for
from relays.sockets import END_MARK, EngineSocket, check_address, unframe_published, unframe_replay
from schemas.errors import FrameError, Unavailable

_HANDSHAKE_S = 10.0
_REPLAY_S = 5.0
_QUIET_S = 0.3  # an engine that announces nothing this long has announced a probe's blocks


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The engine to be checked."""

    engine: str
    version: str
    events: str
    replay: str | None
    topic: str
    rank: int
    api: str | None
    settings: EngineSettings


class Met(NamedTuple):
    """One probe's prediction beside what the engine says."""

    probe: Probe
    predicted: int
    cached: int | None


class Listener:
    """One rank's sockets, from which messages go through decoder, mirror and index in their order."""

    def __init__(self, target: Target, context: zmq.asyncio.Context) -> None:
        self.recorder = Recorder()
        self.pipeline = InProcess(
            profile_for(target.engine, "checked", "checked", target.version, target.settings), target.rank
        )
        self.observed = Observed()
        self.replay_parts: Counter[int] = Counter()
        self.replay_ended: bool | None = None
        self.step = 0
        self._target = target
        self._context = context
        self._socket = EngineSocket(context, target.events, None, target.topic)
        self._connected = asyncio.Event()
        self._messages: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

    async def receive(self) -> None:
        """Receive until cancelled."""

        def on_message(frames: "list[bytes]") -> None:
            self.recorder.frame("pub", frames, self.step)
            try:
                self._messages.put_nowait(unframe_published(frames))
            except FrameError as error:
                self.pipeline.engine.counts[error.reason] += 1

        def on_connection(connected: bool) -> None:
            if connected:
                self._connected.set()

        await self._socket.receive(on_message, on_connection)  # type: ignore[arg-type]

    async def begin(self) -> None:
        """Wait for the connection, then take what the engine's ring holds.

        Raises:
            Unavailable: nobody answers at the address.
        """
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._connected.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"{self._target.events}: no engine publishes there (--events, --kv-events-config)"
            ) from error
        await self._replay(taking=True)
        await self.settle()

    async def look_again(self) -> None:
        """Ask for a replay once more where nothing was in the ring at the beginning."""
        if not self.replay_parts:
            await self._replay(taking=False)

    async def settle(self) -> None:
        """Take messages until the engine has been quiet for a while."""
        while True:
            try:
                async with asyncio.timeout(_QUIET_S):
                    sequence, payload = await self._messages.get()
            except TimeoutError:
                return
            await self._take(sequence, payload)

    async def _take(self, sequence: int, payload: bytes) -> None:
        if self.observed.last is not None and sequence <= self.observed.last and self.step == 0:
            return  # the replay brought it
        self.observed.take(sequence, payload)
        await self.pipeline.take(sequence, payload)

    async def _replay(self, *, taking: bool) -> None:
        """Ask for everything, and note whether the end mark came."""
        if self._target.replay is not None:
            self.replay_ended = await self._replayed(self._target.replay, taking=taking)

    async def _replayed(self, endpoint: str, *, taking: bool) -> bool:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = socket.rcvhwm = 0
            socket.connect(endpoint)
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(_REPLAY_S):
                    frames = await socket.recv_multipart()
                self.recorder.frame("replay", frames, self.step)
                try:
                    sequence, payload = unframe_replay(frames)
                except FrameError as error:
                    self.pipeline.engine.counts[error.reason] += 1
                    continue
                if sequence == END_MARK:
                    return True
                self.replay_parts[len(frames)] += 1
                if taking:
                    await self._take(sequence, payload)
        except TimeoutError:
            return False
        finally:
            socket.close(0)


async def check_live(target: Target, seconds: float) -> tuple[list[Finding], Listener]:
    """Listen to an engine, probe it where its API is given, and return what was found.

    Args:
        seconds: how long to listen where there is no API to probe.

    Raises:
        Unavailable: nobody answers at one of the addresses.
        ConfigError: one of them is none.
    """
    for endpoint in filter(None, (target.events, target.replay)):
        check_address(endpoint)
    context = zmq.asyncio.Context()
    listener = Listener(target, context)
    receiving = asyncio.create_task(listener.receive())
    try:
        await listener.begin()
        engine_version: str | None = None
        met: list[Met] | None = None
        if target.api is None:
            await asyncio.sleep(seconds)
            await listener.settle()
            await listener.look_again()
        else:
            async with EngineApi(target.api, target.engine) as api:
                engine_version = await api.version()
                met = await _probe(listener, api, target)
            await listener.look_again()
    finally:
        receiving.cancel()
        with suppress(asyncio.CancelledError):
            await receiving
        context.destroy(0)
    seen = Seen(
        target.engine,
        target.version,
        wire_of(target.engine, target.version),
        listener.observed,
        listener.pipeline.engine,
        listener.replay_parts,
        listener.replay_ended,
        engine_version,
    )
    return [*check(seen), _probed(met)], listener


async def _probe(listener: Listener, api: EngineApi, target: Target) -> list[Met]:
    """Send the probes one at a time and compare; the first one teaches the unit where nobody gave it."""
    profile = listener.pipeline.engine.mirror.profile
    if not profile.unit:
        listener.step += 1
        probe = Probe("unit", [token % 800 + 10 for token in range(min(512, api.longest_tokens - 8))])
        answer = await api.send(probe)
        if answer.cached_tokens is not None:
            listener.recorder.probe(target.engine, "unit", listener.step, probe.tokens, None, answer.cached_tokens)
        await listener.settle()
    profile = listener.pipeline.engine.mirror.profile
    met: list[Met] = []
    salted = "salt" not in profile.hidden_namespaces
    for probe in probes(profile.unit or 16, api.longest_tokens, salted=salted):
        reach = await listener.pipeline.predict(
            Prompt(profile.model, len(probe.tokens), pack_tokens(probe.tokens), adapter=None, salt=probe.salt)
        )
        listener.step += 1
        answer = await api.send(probe)
        if answer.cached_tokens is not None:
            listener.recorder.probe(
                target.engine, probe.name, listener.step, probe.tokens, probe.salt, answer.cached_tokens
            )
        met.append(Met(probe, reach.tokens, answer.cached_tokens))
        await listener.settle()
    return met


def _probed(met: list[Met] | None) -> Finding:
    if met is None:
        return Finding("predictions", "unseen", "no API was given to send probe prompts to", "--api")
    told = [one for one in met if one.cached is not None]
    if not told:
        return Finding(
            "predictions",
            "unseen",
            "the engine does not say how much it reused",
            "vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report",
        )
    wrong = [
        f"{one.probe.name}: predicted {one.predicted}, engine {one.cached}"
        for one in told
        if one.predicted != one.cached
    ]
    if wrong:
        return Finding("predictions", "unfit", f"{len(wrong)} of {len(told)} probes differ: {'; '.join(wrong)}")
    reused = sum(one.cached or 0 for one in told)
    if not reused:
        return Finding("predictions", "unfit", f"{len(told)} probes, none reused anything", "is prefix caching on?")
    return Finding("predictions", "fit", f"{len(told)} probes equal to the token, {reused} tokens reused")
