"""One holder as its relay sees it: what it has, and how far the index has been told; pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from relays.mirror import Mirror
from relays.records import Voice
from schemas.events import Heartbeat, HolderState, Record
from schemas.profiles import Holder


class MirroredHolder(ABC):
    """A mirror and its voice; a new life has a higher number."""

    def __init__(self, holder: Holder, mirror: Mirror, life: int) -> None:
        self.holder = holder
        self.mirror = mirror
        self.voice = Voice(holder, life)
        self.received: dict[str, int] = {}  # source -> last engine sequence
        self.time_s = 0.0  # of the newest message, by its sender's clock

    @abstractmethod
    def begin_life(self, life: int) -> None:
        """Forget what the holder has; what comes next is said in this life."""

    def say_again(self, life: int) -> None:
        """Tell everything that is known again, in this life."""
        self.mirror.say_again()
        self.voice = Voice(self.holder, life)

    def expire(self, now_s: float, max_age_s: float | None) -> None:
        """Forget copies past this age, in tiers whose copies nothing may ever remove."""
        if max_age_s is not None:
            self.mirror.expire(now_s, max_age_s)

    def speak(self) -> Iterator[Record]:
        """Yield the records that tell the index what is new."""
        return self.voice.speak(self.mirror, self.received, self.time_s)

    def beat(self, state: HolderState, *, share_known: float = 1.0, reason: str = "") -> Record:
        """Return a heartbeat."""
        return self.voice.beat(Heartbeat(state, dict(self.received), share_known, reason), self.time_s)
