"""What the publishers of a store say, given to the models that it is about."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from ops.metrics import RELAY_MESSAGES, RELAY_REJECTS
from relays.dialects import PoolSettings
from relays.llmd import decode_llmd
from relays.lossy import Origin
from relays.mooncake import DEFAULT_KEY_PATTERN, KeyPattern, Shards, decode_mooncake
from relays.pools.source import PoolSource
from relays.sockets import unframe_published
from relays.source import log_refused
from relays.stores import StoreMessage
from schemas.errors import FrameError


class StoreMessages:
    """Takes every message of every publisher; whatever it holds, nothing is raised."""

    def __init__(self, kind: str, name: str, settings: PoolSettings, sources: Mapping[str, PoolSource]) -> None:
        """Prepare.

        Args:
            kind: llmd or mooncake.
            name: of the pool.
            sources: by our names of the models.
        Raises:
            ConfigError: a key pattern that is none.
        """
        self._kind = kind
        self._decode = _decoder(kind, settings)
        self._sources = sources
        self._names = settings.models
        self._log = structlog.get_logger().bind(pool=name)

    def take(self, frames: Sequence[bytes], origin: Origin, now_s: float) -> None:
        """Take one message: topic, sequence, payload."""
        try:
            sequence, payload = unframe_published(frames)
        except FrameError as error:
            self._refuse(error.reason, error.detail)
            return
        RELAY_MESSAGES.labels(self._kind, "published").inc()
        self._judge(origin, sequence, now_s)
        for source in self._sources.values():
            source.pool.received[origin.label] = sequence  # the counter runs over all models, and what cannot be read
        try:
            message = self._decode(frames[0], payload)
        except FrameError as error:
            self._refuse(error.reason, error.detail)
            if error.reason != "topic":  # else it is none of the store's
                origin.doubt(now_s, known=self._knows_anything)
            return
        for reject in message.rejects:
            RELAY_REJECTS.labels(self._kind, reject.reason).inc()
        log_refused(self._log, sequence, message.rejects)
        for name, events in message.events.items():
            source_named = self._model_of(name)
            if source_named is None:
                RELAY_REJECTS.labels(self._kind, "model_unknown").inc(len(events))
            else:
                source_named.take(events, origin, sequence, message.time_s, now_s)

    def connection(self, origin: Origin, *, connected: bool, now_s: float) -> None:
        """Note that a publisher is heard, or no longer."""
        self._log.info("relay.connected" if connected else "relay.disconnected", source=origin.label)
        origin.connection(connected=connected, known=self._knows_anything, now_s=now_s)

    def _judge(self, origin: Origin, sequence: int, now_s: float) -> None:
        """Conclude from a publisher's counter what was lost (DESIGN 5)."""
        seen = origin.take(sequence)
        if seen.verdict == "new_life" and self._kind == "mooncake":
            # the master's memory is what it published; a shared file store outlives its publishers
            for source in self._sources.values():
                source.begin_life("sequence_back", keep=False)
        elif seen.verdict != "next" or seen.missed:
            self._log.warning("relay.gap", source=origin.label, missed=seen.missed, verdict=seen.verdict)
            origin.doubt(now_s, known=self._knows_anything)

    @property
    def _knows_anything(self) -> bool:
        return any(source.pool.mirror.blocks for source in self._sources.values())

    def _model_of(self, name: str) -> PoolSource | None:
        """Return whose events these are: a store that names no model can only hold the one that there is."""
        if not name and len(self._sources) == 1:
            return next(iter(self._sources.values()))
        return self._sources.get(self._names.get(name, name))

    def _refuse(self, reason: str, detail: str) -> None:
        RELAY_REJECTS.labels(self._kind, reason).inc()
        self._log.warning("relay.message_refused", reason=reason, detail=detail)


def _decoder(kind: str, settings: PoolSettings) -> Callable[[bytes, bytes], StoreMessage]:
    """Return (topic, payload) -> what it says."""
    if kind == "mooncake":
        shards = Shards(settings.tp_size, settings.pcp_size, settings.dcp_size, settings.pp_size)
        pattern = KeyPattern(settings.key_pattern or DEFAULT_KEY_PATTERN, shards)
        return lambda topic, payload: decode_mooncake(payload, pattern)
    return decode_llmd
