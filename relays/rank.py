"""One rank's relay: socket, sequence and engine together, and what its heartbeat says."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from ops.metrics import RELAY_BLOCKS, RELAY_DOUBTS, RELAY_LIVES, RELAY_MESSAGES, RELAY_REJECTS, RELAY_REPLAYS
from relays.engine import EngineRank
from relays.sequence import Action, Ask, Deliver, NewLife, Sequencer
from relays.sockets import EngineSocket
from schemas.errors import FrameError
from schemas.events import HolderState, Record

_REPLAY_PAUSE_S = 0.2


class RankRelay:
    """Keeps one rank's mirror true; the process that owns it publishes what the mirror has to say."""

    def __init__(
        self,
        engine: EngineRank,
        socket: EngineSocket,
        *,
        next_life: Callable[[], int],
        on_change: Callable[[], None],
        probe_s: float,
        replay_timeout_s: float,
        unknown_after_s: float,
        buffer_messages: int,
    ) -> None:
        self.engine = engine
        self._socket = socket
        self._sequencer = Sequencer(buffer_messages)
        self._next_life = next_life
        self._on_change = on_change
        self._probe_s = probe_s
        self._replay_timeout_s = replay_timeout_s
        self._unknown_after_s = unknown_after_s
        self._log = structlog.get_logger().bind(replica=engine.holder.name, rank=engine.holder.rank)
        self._label = engine.mirror.profile.engine
        self._asks: asyncio.Queue[int] = asyncio.Queue()
        self._heard_s = 0.0  # when the source last said anything
        self._lost_s: float | None = 0.0  # since when it is not connected
        self._caught_up = False
        self._replay_answered = True
        self._counted: dict[str, int] = {}

    async def run(self) -> None:
        """Receive, replay and probe until cancelled."""
        self._lost_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._socket.receive(self._on_message, self._on_connection))
            tasks.create_task(self._replays())
            tasks.create_task(self._probes())
            # subscribed first; what is published from here on is held until the replay is through
            self._act(self._sequencer.start())

    def speak(self) -> list[Record]:
        """Return the records that tell the index what is new."""
        self._count()
        return list(self.engine.speak())

    def beat(self, now_s: float) -> Record:
        """Return a heartbeat that says how far this source is believed."""
        state, reason = self._state(now_s)
        return self.engine.beat(state, reason=reason, share_known=1.0 if self._caught_up else 0.0)

    def begin_life(self, reason: str, *, keep: bool) -> None:
        """Say everything again in a higher life; `keep`: what is known stays known."""
        life = self._next_life()
        self._log.warning("relay.life_begun", reason=reason, life=life, kept=keep)
        RELAY_LIVES.labels(self._label, reason).inc()
        if keep:
            self.engine.say_again(life)
        else:
            self.engine.begin_life(life)
        self._on_change()

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        if self._lost_s is not None:
            silent_s = now_s - self._lost_s
            return ("unknown" if silent_s > self._unknown_after_s else "stale"), "disconnected"
        if not self._caught_up:
            return "catching_up", ""
        if not self.engine.received:
            return "silent", "no event seen yet"
        return "live", "" if self._replay_answered else "replay_unanswered"

    # ---- what the socket says

    def _on_message(self, frames: Sequence[bytes]) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        if len(frames) != 3 or len(frames[1]) != 8:
            self._reject("frame_count", f"{len(frames)} frames")
            return
        RELAY_MESSAGES.labels(self._label, "published").inc()
        self._act(self._sequencer.live(int.from_bytes(frames[1], "big"), frames[2]))

    def _on_connection(self, connected: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if connected:
            self._lost_s = None
            self._log.info("relay.connected")
            self._act(self._sequencer.start())
        elif self._lost_s is None:
            self._lost_s = now_s
            self._log.warning("relay.disconnected")

    def _on_replayed(self, sequence: int, payload: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        RELAY_MESSAGES.labels(self._label, "replayed").inc()
        self._act(self._sequencer.replayed(sequence, payload))

    # ---- tasks

    async def _replays(self) -> None:
        """Run one replay at a time; a newer request replaces a running one."""
        start = await self._asks.get()
        while True:
            replay = asyncio.create_task(self._replay(start))
            newer = asyncio.create_task(self._asks.get())
            try:
                await asyncio.wait((replay, newer), return_when=asyncio.FIRST_COMPLETED)
                if not newer.done():
                    answered = replay.result()
                    RELAY_REPLAYS.labels(self._label, "answered" if answered else "unanswered").inc()
                    self._replay_answered = answered
                    self._act(self._sequencer.replay_ended(answered=answered))
                    if not self._sequencer.replaying:
                        self._caught_up = self._caught_up or answered or bool(self.engine.received)
                        self._on_change()
                start = await newer
            finally:
                replay.cancel()
                newer.cancel()

    async def _replay(self, start: int) -> bool:
        try:
            return await self._socket.replay(start, self._on_replayed, self._replay_timeout_s)
        except FrameError as error:
            self._reject(error.reason, error.detail)
            await asyncio.sleep(_REPLAY_PAUSE_S)
            return False

    async def _probes(self) -> None:
        """Ask a source that has been quiet for its last message: a lost tail and a restart show only so."""
        loop = asyncio.get_running_loop()
        while True:
            quiet_s = loop.time() - self._heard_s
            if quiet_s < self._probe_s:
                await asyncio.sleep(self._probe_s - quiet_s)
                continue
            self._act(self._sequencer.start())
            await asyncio.sleep(self._probe_s)

    # ---- acting

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(sequence, payload):
                    self._deliver(sequence, payload)
                case Ask(sequence):
                    self._asks.put_nowait(sequence)
                case NewLife(reason):
                    self.begin_life(reason, keep=False)

    def _deliver(self, sequence: int, payload: bytes) -> None:
        decoded = self.engine.take(sequence, payload)
        if decoded is not None and decoded.rejects:
            first = decoded.rejects[0]
            self._log.warning(
                "relay.events_refused",
                sequence=sequence,
                count=len(decoded.rejects),
                reason=first.reason,
                at=first.detail,
            )
        self._on_change()

    def _reject(self, reason: str, detail: str) -> None:
        RELAY_REJECTS.labels(self._label, reason).inc()
        self._log.warning("relay.message_refused", reason=reason, detail=detail)

    def _count(self) -> None:
        """Bring the pure core's counts into the metrics."""
        for family, counts in ((RELAY_REJECTS, self.engine.counts), (RELAY_DOUBTS, self.engine.mirror.counts)):
            for reason, count in counts.items():
                if count:
                    family.labels(self._label, reason).inc(count)
            counts.clear()
        RELAY_BLOCKS.labels(self._label).set(self.engine.mirror.blocks)
