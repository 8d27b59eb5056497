"""The workload as engines would tell it, and as relays would write it to Kafka; pure."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.hashing import Namespace, Tokens, chain_hashes, root_hash
from ops.bench.workload import GPU, Blocks, Step, Workload
from relays.engine_events import EngineEvent, Removed, Stored
from relays.mirror import Mirror
from relays.records import Voice
from schemas.events import Heartbeat, encode_record
from schemas.profiles import Group, Holder, Profile, TierProfile

UNIT = 64
"""Tokens of a block."""

_VOCABULARY = 128_000
_ENGINE_NAMES = np.uint64(0x5BD1E9955BD1E995)  # an engine's name of a block is not ours


class Message(NamedTuple):
    """A record as it goes to Kafka."""

    key: bytes
    value: bytes
    moved: int  # (block, replica) pairs that became held with it


def tokens_of(blocks: Blocks) -> NDArray[np.uint32]:
    """Return the tokens of these blocks, one behind the other."""
    firsts = blocks.astype(np.uint64) * np.uint64(UNIT)
    numbers: NDArray[np.uint64] = np.add.outer(firsts, np.arange(UNIT, dtype=np.uint64))
    return (_mixed(numbers) % np.uint64(_VOCABULARY)).astype(np.uint32).ravel()


def block_hashes(workload: Workload) -> NDArray[np.uint64]:
    """Return our hash of every block of the workload."""
    root = root_hash(Namespace(workload.model, UNIT))
    hashes = np.zeros(workload.blocks, dtype=np.uint64)
    for conversation in workload.conversations:
        first = int(np.count_nonzero(hashes[conversation]))  # the beginning that it shares is known
        if first < len(conversation):
            parent = int(hashes[conversation[first - 1]]) if first else root
            tokens = Tokens(tokens_of(conversation[first:]).tobytes(), wide=False)
            hashes[conversation[first:]] = chain_hashes(parent, tokens, UNIT)
    return hashes


def chain(hashes: NDArray[np.uint64], blocks: Blocks) -> NDArray[np.uint64]:
    """Return the hashes of a prompt's blocks; those that nobody holds have any."""
    known = int(np.count_nonzero(blocks < len(hashes)))
    return np.concatenate([hashes[blocks[:known]], _mixed(blocks[known:].astype(np.uint64))])


def holder(replica: int) -> Holder:
    """Return the holder of a replica's number."""
    return Holder(f"r{replica}", 0)


def messages(workload: Workload, merged: int) -> Iterator[Message]:
    """Yield what the relays of all replicas write; each says after `merged` engine events what has changed.

    Replicas take turns. A heartbeat of each comes last.
    """
    queues: list[list[Step]] = [[] for _ in range(workload.replicas)]
    for step in workload.steps:
        queues[step.replica].append(step)
    relays = [_Relay(workload.model, replica) for replica in range(workload.replicas)]
    for at in range(0, max(map(len, queues)), merged):
        for relay, queue in zip(relays, queues, strict=True):
            if at < len(queue):
                yield from relay.tell(queue[at : at + merged])
    for relay in relays:
        yield Message(relay.key, relay.beat(), 0)


class _Relay:
    """One replica's mirror and voice."""

    def __init__(self, model: str, replica: int) -> None:
        own = holder(replica)
        self.key = own.name.encode()
        self._mirror = Mirror(_profile(model, own.name))
        self._voice = Voice(own, 1)
        self._sequence = 0  # of the last event

    def tell(self, steps: Sequence[Step]) -> Iterator[Message]:
        """Yield the records that these events lead to."""
        moved = sum(step.moved for step in steps if step.stored)
        for step in steps:
            self._sequence += 1
            self._mirror.apply([_event(step)])
        for record in self._voice.speak(self._mirror, {"0": self._sequence}, 0.0):
            yield Message(self.key, encode_record(record), moved)
            moved = 0

    def beat(self) -> bytes:
        """Return a heartbeat's record."""
        return encode_record(self._voice.beat(Heartbeat("live", {"0": self._sequence}), 0.0))


def _event(step: Step) -> EngineEvent:
    names = tuple(_engine_names(step.blocks))
    if not step.stored:
        return Removed(hashes=names, tier="gpu" if step.tier == GPU else "host")
    if step.tier != GPU:
        return Stored(hashes=names, tier="host")  # a copy that names neither tokens nor parent
    parent = _engine_names(np.array([step.parent]))[0] if step.parent >= 0 else None
    tokens = array("I", tokens_of(step.blocks).tobytes())
    return Stored(hashes=names, parent=parent, tokens=tokens, block_size=UNIT)


def _engine_names(blocks: Blocks) -> list[int]:
    names: list[int] = (_mixed(blocks.astype(np.uint64)) ^ _ENGINE_NAMES).tolist()
    return names


def _profile(model: str, name: str) -> Profile:
    return Profile(
        model=model,
        name=name,
        engine="sglang",
        version="0.5",
        dialect="sglang",
        unit=UNIT,
        alignment=UNIT,
        groups=(Group(0, "full", UNIT),),
        tiers=(TierProfile("gpu"), TierProfile("host")),
        hash_only_stores=True,
    )


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the numbers through splitmix64: distinct and without order."""
    with np.errstate(over="ignore"):
        x = numbers + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
