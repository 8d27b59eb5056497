"""One rank whose publisher has no ring, Dynamo's consolidator: what is lost puts it in doubt, and no more."""

import asyncio
from collections.abc import Sequence

from ops.metrics import RELAY_MESSAGES
from relays.engine import EngineRank
from relays.lossy import Belief, Origin
from relays.sockets import EngineSocket, unframe_published
from relays.source import Owner, RankSource
from schemas.errors import FrameError
from schemas.events import HolderState


class LossyRank(RankSource):
    """Keeps one rank's mirror as true as its publisher lets it; what may have ended unheard ages twice as fast.

    A gap is no reason to forget everything: the consolidator says a block once, when the first tier has it.
    """

    def __init__(self, engine: EngineRank, socket: EngineSocket, owner: Owner) -> None:
        super().__init__(engine, owner)
        self._socket = socket
        self._origin = Origin("0")
        self._belief = Belief([self._origin], max_age_s=self.profile.max_age_s, unknown_after_s=owner.unknown_after_s)

    async def run(self) -> None:
        """Receive until cancelled."""
        self._origin.lost_s = asyncio.get_running_loop().time()
        await self._socket.receive(self._on_message, self._on_connection)

    def _state(self, now_s: float) -> tuple[HolderState, str]:
        return self._belief.state(now_s, heard=bool(self.engine.received))

    def _age_limit_s(self, now_s: float) -> float | None:
        return self._belief.age_limit_s(now_s)

    def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            sequence, payload = unframe_published(frames)
        except FrameError as error:
            self._reject(error.reason, error.detail)
            return
        RELAY_MESSAGES.labels(self._label, "published").inc()
        now_s = asyncio.get_running_loop().time()
        seen = self._origin.take(sequence)
        if seen.verdict == "new_life":
            self.begin_life("sequence_back", keep=False)
            self._origin.trust()
        elif seen.verdict == "gap":
            self._log.warning("relay.gap", missed=seen.missed)
            self._origin.doubt(now_s, known=self._knows_anything)
        self._report(sequence, self.engine.take(sequence, payload, now_s=now_s))
        self._on_change()

    def _on_connection(self, connected: bool) -> None:
        self._log.info("relay.connected" if connected else "relay.disconnected")
        now_s = asyncio.get_running_loop().time()
        self._origin.connection(connected=connected, known=self._knows_anything, now_s=now_s)

    @property
    def _knows_anything(self) -> bool:
        return self.engine.mirror.blocks > 0
