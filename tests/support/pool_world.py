"""A pool's relay without sockets and Kafka: publishers' messages and replicas' records in, an index out; time is given.

All that crosses a process goes through its bytes; what the router would answer is asked as the router does.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from index.fold import Flush, fold
from index.hashing import pack_tokens
from index.liveness import BELIEVED, Judgement, judge
from index.lookup import Prompt, Question, ask, reaches
from index.match import Reach
from index.memory_store import MemoryStore
from relays.cache.block_table import Limits
from relays.dialects import PoolSettings, pool_profile
from relays.engine import EngineRank
from relays.lossy import Origin
from relays.pools.messages import StoreMessages
from relays.pools.pool import PoolModel
from relays.pools.source import PoolSource
from relays.source import Owner
from schemas.events import Record, decode_record, encode_record
from schemas.profiles import Holder
from tests.support.coroutines import immediate

POOL = "shelf"
UNKNOWN_AFTER_S = 30.0


class PoolWorld:
    """One pool of some models, the replicas' records, and the index."""

    def __init__(
        self,
        kind: str,
        settings: PoolSettings,
        *,
        models: Sequence[str] = ("m",),
        publishers: int = 1,
        limits: Limits | None = None,
    ) -> None:
        self.now_s = 1000.0
        self.store = MemoryStore(lambda: self.now_s)
        self.log: dict[str, list[bytes]] = {model: [] for model in models}
        self.origins: list[Origin] = []
        self.sources: dict[str, PoolSource] = {}
        self._kind = kind
        self._settings = settings
        self._publishers = publishers
        self.limits = limits or Limits()
        self._lives = count(1)
        self._read: dict[str, int] = {}
        for model in models:
            immediate(self.store.setup(model))
        self.start()

    def start(self, *, connected: bool = True) -> None:
        """Let the pool's relay begin, as its process does; whatever it knew before is gone from its memory."""
        self.origins = [Origin(str(number)) for number in range(self._publishers)]
        self._read = dict.fromkeys(self.log, 0)
        self.sources.clear()
        for model in self.log:
            profile = pool_profile(self._kind, model, POOL, self._settings)
            pool = PoolModel(profile, next(self._lives), limits=self.limits)
            self.sources[model] = PoolSource(
                pool,
                self.origins,
                Owner(lambda: next(self._lives), lambda: None, UNKNOWN_AFTER_S),
            )
            self.sources[model].await_past(self.limits.blocks)
        self.messages = StoreMessages(self._kind, POOL, self._settings, self.sources)
        for origin in self.origins:
            origin.lost_s = self.now_s
            if connected:
                self.messages.connection(origin, connected=True, now_s=self.now_s)

    @property
    def source(self) -> PoolSource:
        """The first model's part."""
        return next(iter(self.sources.values()))

    # ---- what happens

    def tell(self, engine: EngineRank) -> None:
        """Bring what a replica's mirror has to say to the index, and into the log that the pool's relay reads."""
        model = engine.mirror.profile.model
        self._publish(model, list(engine.speak()))

    def read(self, most: int | None = None) -> None:
        """Let the pool's relay read on, so many records of each model at most."""
        for model, log in self.log.items():
            first = self._read[model]
            for value in log[first : None if most is None else first + most]:
                record = decode_record(value)
                source = self.sources[model]
                if record.holder == source.holder:
                    if source.past is not None:
                        source.past.take(record)
                else:
                    source.pool.learn(record)
                self._read[model] += 1

    def catch_up(self) -> None:
        """Let the pool's relay read to the end, and begin to speak with what an earlier run told."""
        self.read()
        for source in self.sources.values():
            if source.past is not None:
                source.restore(self.now_s)
        self.speak()

    def hear(self, frames: Sequence[bytes], publisher: int = 0) -> None:
        """Let a publisher's message arrive."""
        self.messages.take(frames, self.origins[publisher], self.now_s)

    def speak(self, *, most: int | None = None) -> None:
        """Bring what the pool's relay has to say to the index, so many records of each model at most."""
        for model, source in self.sources.items():
            self._publish(model, list(_spoken(source, most)))

    def beat(self, after_s: float = 0.0) -> Judgement:
        """Let time pass and the pool's relay beat; return what a router then thinks of the first model's part."""
        self.now_s += after_s
        for model, source in self.sources.items():
            self._publish(model, [source.beat(self.now_s)])
        self.speak()
        return self.judgement()

    # ---- what is known

    def judgement(self, model: str | None = None) -> Judgement:
        """Return what a router thinks of a model's part."""
        model = model or next(iter(self.log))
        rows = {row.holder: row for row in immediate(self.store.holders(model))}
        row = rows.get(Holder(POOL, None))
        return (
            Judgement("unknown", ("no_row",))
            if row is None
            else judge(row, stale_after_s=5.0, unknown_after_s=UNKNOWN_AFTER_S)
        )

    def digest(self, model: str | None = None) -> int:
        """Return the pool's index digest."""
        return immediate(self.store.digest(model or next(iter(self.log)), Holder(POOL, None)))

    def reach(self, prompt: Prompt, *, pools: bool = True) -> dict[Holder, Reach]:
        """Return what each replica would reuse, as a router says; without `pools` of its own alone."""
        questions: list[Question] = []
        believed: list[Question] = []
        for row in immediate(self.store.holders(prompt.model)):
            if row.profile is None:
                continue
            judged = judge(row, stale_after_s=5.0, unknown_after_s=UNKNOWN_AFTER_S)
            if row.holder.rank is not None:
                questions.append(ask(row.holder, row.profile))
            elif judged.state in BELIEVED and pools:
                believed.append(ask(row.holder, row.profile))
        return immediate(reaches(self.store, prompt, questions, believed))

    def _publish(self, model: str, records: Sequence[Record]) -> None:
        values = [encode_record(record) for record in records]
        self.log[model] += values
        immediate(self.store.apply(Flush(model, None, fold([decode_record(value) for value in values]))))


def plain(tokens: Sequence[int], model: str = "m") -> Prompt:
    """Return a prompt without namespace or media."""
    return Prompt(model, len(tokens), pack_tokens(tokens))


def _spoken(source: PoolSource, most: int | None) -> Iterator[Record]:
    for number in count():
        record = source.next_record() if most is None or number < most else None
        if record is None:
            return
        yield record
