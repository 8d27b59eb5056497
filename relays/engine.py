"""One rank of one engine as a relay sees it: sequence, decoder, mirror and voice together; pure."""

from collections import Counter

from relays.cache.block_table import Limits
from relays.cache.placing import HashCheck
from relays.decoders import decoder_of
from relays.engine_events import Decoded, RejectReason
from relays.holder import MirroredHolder
from relays.mirror import Mirror
from relays.records import Voice
from relays.vllm_hashes import first_block_check
from schemas.errors import FrameError
from schemas.events import MAX_NUMBER
from schemas.profiles import Holder, Profile


class EngineRank(MirroredHolder):
    """Turns one rank's messages into records; a new life starts empty and with a higher number."""

    def __init__(
        self, profile: Profile, holder: Holder, life: int, *, secret: bytes = b"", limits: Limits | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()  # refused messages and events, by reason
        self._profile = profile
        self._secret = secret
        self._limits = limits
        self.decode = decoder_of(profile)
        self._check: HashCheck | None = first_block_check(profile)
        super().__init__(holder, self._new_mirror(), life)

    def begin_life(self, life: int) -> None:
        """Forget everything, what was learnt of the engine too; what comes next is said in this life."""
        self.mirror = self._new_mirror()
        self.voice = Voice(self.holder, life)
        self.received = {}

    def take(self, sequence: int, payload: bytes, source: str = "0", now_s: float = 0.0) -> Decoded | None:
        """Apply one message, or count why not; its sequence is passed either way, unless no record can carry it."""
        if sequence > MAX_NUMBER:
            self.counts["sequence"] += 1
            return None
        self.received[source] = sequence
        try:
            decoded = self.decode(sequence, payload)
        except FrameError as error:
            self.counts[error.reason] += 1
            return None
        if decoded.rank is not None and decoded.rank != self.holder.rank:
            self.counts["rank_mismatch"] += 1  # the subscription's rank is the one that was verified
            return None
        for reject in decoded.rejects:
            self.counts[reject.reason] += 1
            if reject.reason is RejectReason.GROUP_KIND:
                self.mirror.learn_upper_bound()  # the group goes on to limit the engine's hits, unseen
        self.time_s = decoded.time_s
        self.mirror.apply(decoded.events, now_s)
        return decoded

    def learn_windows(self, sizes: tuple[int, ...]) -> None:
        """Take in the attention windows that announce blocks, largest first."""
        self.mirror.learn_windows(sizes)

    def _new_mirror(self) -> Mirror:
        return Mirror(self._profile, secret=self._secret, limits=self._limits, hash_check=self._check)
