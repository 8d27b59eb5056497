"""What is predicted of a pool that names blocks by engine hash, against sets of names in a few lines.

The truth is the engine's: it hashes a prompt's blocks itself and asks the store for those names. vLLM's own names are
computed here as vLLM does, and the recordings say when its replica stored and dropped them. Two rules say what is then
loaded: an llm-d file stands for the blocks that end with its name, files are loaded from where the device ends, none
alone that the device has a part of (OffloadingConnector); Mooncake is looked up from the prompt's start and never gives
its last token (MooncakeStoreConnector). Both come second to what the replica's own connector has (MultiConnector).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from index.lookup import Prompt
from ops.replay.capture import MODEL, Capture, load_capture
from ops.replay.vllm import Request, profile_of, steps_of
from relays.dialects import EngineSettings, PoolSettings, sglang_profile
from relays.engine import EngineRank
from relays.engine_events import Cleared, Removed, Stored
from schemas.profiles import HashScheme, Holder, PoolUse
from tests.support.captures import CAPTURES, SHORT
from tests.support.pool_frames import file_message, keys_of, object_event, object_message
from tests.support.pool_world import POOL, PoolWorld, plain
from tests.support.vllm_names import names_of

UNIT = 32
MAX_AGE_S = 1000.0
USES = (PoolUse(POOL),)
TIERS = {"cpu": "host", "disk": "disk"}
KINDS = [("llmd", 1, 1), ("llmd", 1, 4), ("mooncake", 1, 1), ("mooncake", 2, 1), ("mooncake", 3, 2)]
STYLES = ("long", "older", "short", "prefixed", "decimal", "hex")

# unit 32, one group that behaves as full attention, a seed that is known
RECORDINGS = [
    SHORT / "0.14.1-salt-lora",
    *(
        CAPTURES / "vllm" / name
        for name in ("0.12.0-plain", "0.14.1-swa-gemma3", "0.32.0-plain", "0.32.0-plain-bytes", "0.32.0-chunked")
    ),
]

Held = dict[int, set[tuple[str, int]]]
"""Name -> the (tier, shard) in which it is."""


class Store:
    """A store that changes at random, and what one who hears only some of its messages may know of it."""

    def __init__(self, rng: Random, kind: str, shards: int, chunk: int, prompts: Sequence[Sequence[int]]) -> None:
        self.kind = kind
        self.shards = shards
        self.chunk = chunk
        self.style = rng.choice(STYLES if shards == 1 else STYLES[:4])
        self.real: Held = {}
        self.heard: Held = {}
        self.sequence = 0
        self._rng = rng
        self._prompts = prompts  # by their blocks' names

    @property
    def settings(self) -> PoolSettings:
        """What an operator sets."""
        return PoolSettings(
            block_size=UNIT,
            blocks_per_chunk=self.chunk,
            tp_size=self.shards,
            hash_seed="0",
            max_age_s=MAX_AGE_S,
            models={f"blue@{MODEL}": MODEL} if self.style == "prefixed" else {},
        )

    def message(self, *, heard: bool = True, sizes: range = range(1, 10)) -> list[bytes]:
        """Change, and return what is published of it; that is applied to what is `heard` too, or not."""
        self.sequence += 1
        events = [self._change(heard, sizes) for _ in range(self._rng.choice([1, 1, 2]))]
        if self.kind == "llmd":
            medium = self._rng.choice(["SHARED_STORAGE", "OBJECT_STORE"])
            return file_message(
                MODEL, *((kind, names) for kind, names, _, _ in events), medium=medium, sequence=self.sequence
            )
        objects = [event for change in events for event in self._objects(*change)]
        return object_message(*objects, sequence=self.sequence)

    def loaded(self, table: Held, names: Sequence[int | None], own_tokens: int, prompt_tokens: int) -> int:
        """Return the prefix that a replica has with what a table says of a prompt's blocks, by the connector's rule."""
        there = [name is not None and self._whole(table.get(name, set())) for name in names]
        size = self.chunk * UNIT
        number = 0 if self.kind == "mooncake" else own_tokens // size
        while (number + 1) * self.chunk <= len(there) and there[(number + 1) * self.chunk - 1]:
            number += 1
        if self.kind == "mooncake":
            return max(own_tokens, min(number * size, (prompt_tokens - 1) // UNIT * UNIT))
        return number * size if number * size - own_tokens >= size else own_tokens

    def _change(self, heard: bool, sizes: range) -> tuple[str, list[int], str, list[int]]:
        """Store or remove some blocks, or some of their shards: any removal ends a block everywhere."""
        rng = self._rng
        prompt = rng.choice(self._prompts)
        first = rng.choice([0, rng.randrange(len(prompt))])
        names = list(prompt[first : first + rng.choice(sizes)])
        stored = not self.real or rng.random() < 0.75
        if not stored:
            names = rng.sample(sorted(self.real), min(len(self.real), rng.choice([1, 1, 2, 5])))
        names += names[:1] if rng.random() < 0.2 else []  # announced twice
        whole = not stored or rng.random() < 0.7
        shards = sorted(range(self.shards) if whole else rng.sample(range(self.shards), rng.randint(1, self.shards)))
        medium = rng.choice(list(TIERS))
        tier = TIERS[medium] if self.kind == "mooncake" else "disk"
        for table in (self.real, self.heard) if heard else (self.real,):
            for name in names:
                if stored:
                    table.setdefault(name, set()).update((tier, shard) for shard in shards)
                else:
                    table.pop(name, None)
        return "stored" if stored else "removed", names, medium, shards

    def _objects(self, kind: str, names: Sequence[int], medium: str, shards: Sequence[int]) -> list[dict[str, Any]]:
        if self.style in ("decimal", "hex"):
            return [object_event(kind, str(n) if self.style == "decimal" else hex(n), medium, n) for n in names]
        return [object_event(kind, key, medium) for key in keys_of(MODEL, names, shards, self.style)]

    def _whole(self, held: set[tuple[str, int]]) -> bool:
        """Return whether one tier has all objects of a block."""
        return any(all((tier, shard) in held for shard in range(self.shards)) for tier in TIERS.values())


class Replica:
    """A recorded engine: its records, its blocks by name, and the names that its records have told."""

    def __init__(self, capture: Capture, name: str = "r", **changes: Any) -> None:
        profile = msgspec.structs.replace(profile_of(capture), name=name, pools=USES, **changes)
        self.engine = EngineRank(profile, Holder(name, 0), 1)
        self.told: set[int] = set()
        self._copies: Counter[int] = Counter()

    def take(self, number: int, payload: bytes) -> None:
        """Take a recorded message."""
        decoded = self.engine.take(number, payload)
        for event in decoded.events if decoded is not None else ():
            if isinstance(event, Cleared):
                self._copies.clear()
            elif isinstance(event, Stored | Removed) and event.tier == "gpu":
                change = 1 if isinstance(event, Stored) else -1
                self._copies.update({_low(name): change for name in event.hashes})
        self.told |= {name for name, copies in self._copies.items() if copies > 0}

    def hit(self, names: Sequence[int], prompt_tokens: int) -> int:
        """Return what the device alone gives."""
        blocks = next((n for n, name in enumerate(names) if self._copies[name] <= 0), len(names))
        return min(blocks, (prompt_tokens - 1) // UNIT) * UNIT


class Scene:
    """A recording, a store, the pool's relay and the index; two replicas read the pool.

    One does as recorded. The other is behind: it does the same at half the pace, so that it lacks what is known of.
    """

    def __init__(self, folder: Path, kind: str, shards: int, chunk: int, seed: int = 0) -> None:
        if not folder.exists():
            pytest.skip(f"{folder.name} is not in the folder that KVATLAS_CAPTURES names")
        self.rng = Random(f"{folder.name} {kind} {shards} {chunk} {seed}")
        self.capture, self.requests = recording(folder)
        self.store = Store(self.rng, kind, shards, chunk, [named(request) for request in self.requests])
        self.replica, self.behind = Replica(self.capture), Replica(self.capture, "behind")
        self.world = PoolWorld(kind, self.store.settings, models=[MODEL])
        self.placed: set[int] = set()  # names whose place the pool's relay has read of
        self.kinds: Counter[tuple[bool, bool]] = Counter()  # of exact comparisons: has blocks of its own, of the pool

    def play(self) -> Iterator[int]:
        """Let the replicas do the next of what is recorded, and tell it; yield its number."""
        for number, frame in enumerate(self.capture.published):
            self.replica.take(number, frame.parts[2])
            self.world.tell(self.replica.engine)
            if number % 2:
                self.behind.take(number // 2, self.capture.published[number // 2].parts[2])
            self.world.tell(self.behind.engine)
            yield number

    def play_all(self) -> None:
        """Let the replicas do all that is recorded, and the pool's relay read it."""
        for _ in self.play():
            pass
        self.read()

    def read(self) -> None:
        """Let the pool's relay read all that the replicas have told."""
        self.world.catch_up() if self.world.source.past is not None else self.world.read()
        self.placed = self.replica.told | self.behind.told

    def compare(self, request: Request, *, exact: bool) -> bool:
        """Return whether the predictions of a prompt are at most what the store really gives.

        Args:
            exact: they must be what the names say that were heard of.
        """
        names, count = named(request), len(request.tokens or ())
        # up to 0.16 events do not tell a salt: a salted prompt is known to nobody
        hidden = request.salt is not None
        known = [None if hidden or name not in self.placed else name for name in names]
        reaches = self.world.reach(asked(request))
        kept = True
        for replica in (self.replica, self.behind):
            reach = reaches[replica.engine.holder]
            own = 0 if hidden else replica.hit(names, count)
            most = self.store.loaded(self.store.real, names, own, count)
            kept &= reach.tokens <= most
            if not exact:
                continue
            expected = self.store.loaded(self.store.heard, known, own, count)
            assert reach.tokens == sum(reach.by_tier.values()) == expected
            assert reach.by_tier.get("pool", 0) == expected - own == sum(reach.pools.get(POOL, {}).values())
            self.kinds[own > 0, expected > own] += 1
        return kept


@cache
def recording(folder: Path) -> tuple[Capture, list[Request]]:
    """Return a recording and the prompts of it whose blocks' names can be computed."""
    capture = load_capture(folder)
    old = capture.version < "0.18"
    requests = [request for step in steps_of(capture) for request in step.requests]
    return capture, [r for r in requests if r.tokens and not r.media and (old or (r.salt, r.adapter) == (None, None))]


@cache
def _named(tokens: tuple[int, ...], salt: str | None, adapter: str | None) -> list[int]:
    return names_of(tokens, UNIT, "0", salt=salt, adapter=adapter)


def named(request: Request) -> list[int]:
    """Return the names that the engine gives a prompt's blocks."""
    return _named(request.tokens or (), request.salt, request.adapter)


def asked(request: Request) -> Prompt:
    """Return the question about a prompt."""
    prompt = plain(request.tokens or (), MODEL)
    return msgspec.structs.replace(prompt, salt=request.salt, adapter=request.adapter)


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "late"])
@pytest.mark.parametrize(("kind", "shards", "chunk"), KINDS)
@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda folder: folder.name)
def test_the_prediction_is_what_the_names_say(folder: Path, kind: str, shards: int, chunk: int, late: bool) -> None:
    """At every message of a recording, beside a store that changes at random; the replica's records are read late.

    A relay that joins late knows nothing of what the store said before, but all that the replica has ever told.
    """
    scene = Scene(folder, kind, shards, chunk)
    count = len(scene.capture.published)
    joins = count // 3 if late else 0
    for number in scene.play():
        if number == joins:
            scene.world.start()
            scene.read()
        for _ in range(ceil(200 / count)):
            for _ in range(scene.rng.choice([0, 1, 1, 2])):
                message = scene.store.message(heard=number >= joins)
                if number >= joins:
                    scene.world.hear(message)
            if number < joins:
                continue
            if scene.rng.random() < 0.5:
                scene.read()
            assert scene.world.beat().state in ("live", "silent")
            for request in scene.rng.sample(scene.requests, 5):
                scene.compare(request, exact=True)
    assert {pool for _, pool in scene.kinds} == {False, True}
    if count > 100:  # a short one tells a prompt whole, or not at all
        assert len(scene.kinds) == 4


@pytest.mark.parametrize(("kind", "shards", "chunk"), [kind for kind in KINDS if kind != ("llmd", 1, 4)])
def test_lost_messages_put_nothing_wrong_unmarked(kind: str, shards: int, chunk: int) -> None:
    """Whatever is lost: while the pool is called live, no more is predicted than the store really has.

    Losses show with the next message that arrives. Long after the last one the pool is live again.
    """
    states: Counter[str] = Counter()
    above = 0
    for seed in range(4):
        scene = Scene(SHORT / "0.14.1-salt-lora", kind, shards, chunk, seed)
        scene.play_all()
        for step in range(400):
            lost = step % 200 < 60 and scene.rng.random() < 0.2
            message = scene.store.message(heard=not lost)
            if not lost:
                scene.world.hear(message)
            state = scene.world.beat(after_s=scene.rng.uniform(0, MAX_AGE_S / 50)).state
            states[state] += 1
            for request in scene.rng.sample(scene.requests, 3):
                kept = scene.compare(request, exact=False)
                assert kept or lost or state == "stale"
                above += not kept
        assert state == "live"
    assert min(states["stale"], states["live"]) > 200
    assert above, "no loss mattered: nothing was tried"


@pytest.mark.parametrize("kind", ["llmd", "mooncake"])
def test_replicas_that_name_blocks_another_way_get_nothing(kind: str) -> None:
    """Of another seed, of none that is known, of another algorithm, of other blocks, or no vLLM: 0 tokens of the pool.

    Though the blocks are there, with their places, for the sake of a replica that does read them; and the pool's
    heartbeat, and so the router, says who cannot and why.
    """
    scene = Scene(SHORT / "0.14.1-salt-lora", kind, 1, 1)
    sglang = sglang_profile(MODEL, "sglang", "0.5.23", EngineSettings(block_size=UNIT, pools=USES))
    others = {
        "seed": Replica(scene.capture, "seed", hash=HashScheme("sha256", "1")),
        "random": Replica(scene.capture, "random", hash=HashScheme("sha256", None)),
        "algorithm": Replica(scene.capture, "algorithm", hash=HashScheme("sha256_cbor", "0")),
        "blocks": Replica(scene.capture, "blocks", unit=UNIT // 2, alignment=UNIT // 2),
    }
    engines = {name: replica.engine for name, replica in others.items()}
    engines["sglang"] = EngineRank(sglang, Holder("sglang", 0), 1)
    scene.play_all()
    for engine in engines.values():
        scene.world.tell(engine)
    scene.read()
    for _ in range(60):
        scene.world.hear(scene.store.message())
    judgement = scene.world.beat()
    assert judgement.state == "live"
    (reason,) = judgement.reasons
    for name in engines:
        assert f"{name}: {'block_size' if name == 'blocks' else 'hash_mismatch'}" in reason
    credited = 0
    for request in scene.requests:
        scene.compare(request, exact=True)
        reaches = scene.world.reach(asked(request))
        credited += bool(reaches[scene.behind.engine.holder].pools)
        for engine in engines.values():
            assert not reaches[engine.holder].pools
    assert credited


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_replicas_own_host_memory_comes_first(chunk: int) -> None:
    """Where its own connector has more than the device, that is loaded, and nothing from the pool; else the pool's.

    With neither, with either and with both: the pool adds exactly where the replica alone has the device only.
    """
    scene = Scene(CAPTURES / "vllm" / "0.32.0-offload", "llmd", 1, chunk)
    kinds: Counter[tuple[bool, bool]] = Counter()
    for _ in scene.play():
        scene.world.hear(scene.store.message())
        scene.read()
        scene.world.beat()
        for request in scene.rng.sample(scene.requests, 5):
            names, count = named(request), len(request.tokens or ())
            holder = scene.replica.engine.holder
            alone = scene.world.reach(asked(request), pools=False)[holder]
            device = alone.by_tier.get("gpu", 0)
            assert device == scene.replica.hit(names, count)
            expected = alone.tokens
            if alone.tokens == device:
                known = [name if name in scene.placed else None for name in names]
                expected = scene.store.loaded(scene.store.heard, known, device, count)
            reach = scene.world.reach(asked(request))[holder]
            assert reach.tokens == expected
            assert {tier: n for tier, n in reach.by_tier.items() if tier != "pool"} == alone.by_tier
            kinds[alone.tokens > device, reach.tokens > alone.tokens] += 1
    assert set(kinds) == {(False, False), (True, False), (False, True)}


def _low(name: int | bytes) -> int:
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")
