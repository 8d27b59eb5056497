"""A bench whose engines speak SGLang: what they say by version, and a relay that is told so."""

import random
from typing import Any

import msgspec

from relays.dialects import EngineSettings, parse_version
from tests.support.bench import Bench, Index
from tests.support.payloads import array_stored, batch, map_removed, pack
from tests.support.sglang_frames import map_stored

PAGE = 4
_MEDIA = ("GPU", "GPU", "CPU_PINNED")


class SglangTraffic:
    """Messages of an engine with pages of four tokens and a host tier, the same for the same seed and version."""

    def __init__(self, version: str, seed: int = 0, rank: int = 0, clears: float = 0.02) -> None:
        self._rng = random.Random(f"{version} {seed}")
        self._maps = parse_version(version) >= (0, 5, 20)
        self._rank = rank
        self._clears = clears
        self._held: list[tuple[int, str]] = []  # signed names and their tier

    def message(self) -> bytes:
        """Return the next message: one to three events."""
        return pack(batch(*(self._event() for _ in range(self._rng.randint(1, 3))), rank=self._rank))

    def _event(self) -> object:
        choice = self._rng.random()
        if choice < self._clears:
            self._held = []
            return {"type": "AllBlocksCleared"} if self._maps else ["AllBlocksCleared"]
        if choice < 0.35 and self._held:
            name, medium = self._held.pop(self._rng.randrange(len(self._held)))
            if self._maps:
                return map_removed(block_hashes=[name], medium=medium)
            return ["BlockRemoved", [name], medium]
        return self._store()

    def _store(self) -> object:
        parent = self._rng.choice([None, *(name for name, _ in self._held[-20:])])
        names = [self._rng.getrandbits(64) - (1 << 63) for _ in range(self._rng.randint(1, 5))]
        medium = self._rng.choice(_MEDIA)
        self._held += [(name, medium) for name in names]
        tokens = [self._rng.randrange(1000) for _ in range(PAGE * len(names))]
        if self._maps:
            return map_stored(block_hashes=names, parent_block_hash=parent, token_ids=tokens, medium=medium)
        salt = {"cache_salt": "tenant"} if parent is None and self._rng.random() < 0.3 else None
        return array_stored(names, parent, tokens, PAGE, None, medium, salt)


class SglangBench(Bench):
    """One replica whose engines are of an SGLang version; replays are framed as that version does."""

    def __init__(self, brokers: str, model: str, index: Index, *, version: str, ranks: int = 1, **options: Any) -> None:
        topic_in_replays = parse_version(version) >= (0, 5, 22)
        super().__init__(brokers, model, index, ranks=ranks, topic_in_replays=topic_in_replays, **options)
        settings = EngineSettings(block_size=PAGE, hicache=True)
        self.config = msgspec.structs.replace(self.config, engine="sglang", version=version, settings=settings)
        self.truths = [self.new_truth(rank) for rank in range(ranks)]
        self._speech = [SglangTraffic(version, seed=rank, rank=rank) for rank in range(ranks)]

    async def publish(self, count: int, *, rank: int = 0, lost: float = 0.0, seed: int = 0) -> None:
        """Let an engine publish; that share of the messages is lost on the way."""
        losses = random.Random(seed)
        for _ in range(count):
            payload = self._speech[rank].message()
            engine = self.engines[rank]
            sequence = engine.lose(payload) if losses.random() < lost else await engine.publish(payload)
            self.truths[rank].take(sequence, payload)

    async def restart_engine(self, rank: int = 0) -> None:
        """Let an engine begin anew, with an empty cache."""
        await super().restart_engine(rank)
        self._speech[rank] = SglangTraffic(self.config.version, seed=1000 + rank, rank=rank)
