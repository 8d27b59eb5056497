"""One rank whose engine publishes: socket, sequence and engine together, and what its heartbeat says."""

import asyncio
import random
from collections.abc import Sequence

from ops.metrics import RELAY_MESSAGES, RELAY_REPLAYS
from relays.engine import EngineRank
from relays.sequence import Action, Ask, Deliver, NewLife, Sequencer
from relays.sockets import EngineSocket, unframe_published
from relays.source import Owner, RankSource
from schemas.errors import FrameError
from schemas.events import MAX_NUMBER, HolderState

_TICK_S = 0.25
_AFTER_CONNECTION_S = 1.0


class RankRelay(RankSource):
    """Keeps one rank's mirror true; the process that owns it publishes what the mirror has to say."""

    def __init__(
        self,
        engine: EngineRank,
        socket: EngineSocket,
        owner: Owner,
        *,
        probe_s: float,
        replay_timeout_s: float,
        buffer_messages: int,
    ) -> None:
        super().__init__(engine, owner)
        self._socket = socket
        self._sequencer = Sequencer(buffer_messages, has_ring=socket.has_replay)
        self._probe_s = probe_s
        self._replay_timeout_s = replay_timeout_s
        self._asks: asyncio.Queue[Ask] = asyncio.Queue()
        self._probe_at_s = 0.0  # when the source is asked next, if it says nothing before
        self._lost_s: float | None = 0.0  # since when it is not connected
        self._replay_answered = False

    async def run(self) -> None:
        """Receive, replay and probe until cancelled."""
        self._lost_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            # asked when subscribed; what is published from then on is held until the replay is through
            tasks.create_task(self._socket.receive(self._on_message, self._on_connection))
            tasks.create_task(self._replays())
            tasks.create_task(self._probes())

    @property
    def _share_known(self) -> float:
        return 1.0 if self._sequencer.caught_up else 0.0

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        if self._lost_s is not None:
            return self._unconnected(self._lost_s, now_s)
        if not self._sequencer.caught_up:
            return "catching_up", ""
        answered = self._replay_answered and self._sequencer.verified
        if self._socket.has_replay and not answered:
            return "stale", "replay_unanswered"
        if not self.engine.received:
            return "silent", "no event seen yet"
        if not self._socket.has_replay:
            return ("live" if self._sequencer.verified else "stale"), "no_replay"
        return "live", ""

    # ---- what the socket says

    def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            sequence, payload = unframe_published(frames)
        except FrameError as error:
            self._reject(error.reason, error.detail)
            return
        self._put_off_probe()
        RELAY_MESSAGES.labels(self._label, "published").inc()
        self._act(self._sequencer.live(sequence, payload))

    def _on_connection(self, connected: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if connected:
            self._lost_s = None
            self._log.info("relay.connected")
            self._act(self._sequencer.connect())
            # the subscription may reach the engine after the replay did, and what lies between would be missed
            self._probe_at_s = now_s + min(_AFTER_CONNECTION_S, self._probe_s)
        elif self._lost_s is None:
            self._lost_s = now_s
            self._sequencer.disconnect()
            self._log.warning("relay.disconnected")

    def _on_replayed(self, ask: Ask, sequence: int, payload: bytes) -> None:
        if sequence > MAX_NUMBER:
            self._reject("sequence", f"{sequence} of a replayed message, at most {MAX_NUMBER}")
            return
        RELAY_MESSAGES.labels(self._label, "replayed").inc()
        self._act(self._sequencer.replayed(ask.number, sequence, payload))

    # ---- tasks

    async def _replays(self) -> None:
        """Run one replay at a time; a newer request replaces a running one."""
        ask = await self._asks.get()
        while True:
            replay = asyncio.create_task(self._replay(ask))
            newer = asyncio.create_task(self._asks.get())
            try:
                await asyncio.wait((replay, newer), return_when=asyncio.FIRST_COMPLETED)
                if not newer.done():
                    self._replay_answered = replay.result()
                    RELAY_REPLAYS.labels(self._label, "answered" if replay.result() else "unanswered").inc()
                    self._act(self._sequencer.replay_ended(ask.number, answered=replay.result()))
                    self._on_change()
                ask = await newer
            finally:
                replay.cancel()
                newer.cancel()

    async def _replay(self, ask: Ask) -> bool:
        return await self._socket.replay(
            ask.sequence,
            lambda sequence, payload: self._on_replayed(ask, sequence, payload),
            lambda error: self._reject(error.reason, error.detail),
            self._replay_timeout_s,
        )

    async def _probes(self) -> None:
        """Ask a source that has been quiet for its last message: a lost tail and a restart show only so."""
        loop = asyncio.get_running_loop()
        self._put_off_probe()
        while True:
            await asyncio.sleep(min(_TICK_S, self._probe_s))
            if loop.time() >= self._probe_at_s and self._lost_s is None:
                self._put_off_probe()
                self._act(self._sequencer.probe())

    def _put_off_probe(self) -> None:
        # not all sources at the same moment
        self._probe_at_s = asyncio.get_running_loop().time() + self._probe_s * random.uniform(0.8, 1.0)

    # ---- acting

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(sequence, payload):
                    self._deliver(sequence, payload)
                case Ask():
                    self._asks.put_nowait(action)
                case NewLife(reason):
                    self.begin_life(reason, keep=False)

    def _deliver(self, sequence: int, payload: bytes) -> None:
        now_s = asyncio.get_running_loop().time()
        self._report(sequence, self.engine.take(sequence, payload, now_s=now_s))
        self._on_change()
