"""The notation's own events as a dialect: parent 0 is a root, an absent medium is GPU, letters are hashes."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from relays.batches import Refused, check_tokens
from relays.engine_events import (
    Cleared,
    Decoded,
    EngineEvent,
    EngineHash,
    MediaKey,
    Reject,
    RejectReason,
    Removed,
    Stored,
    normalize_hash,
)
from relays.sglang import unfold_pairs
from schemas.errors import FrameError
from schemas.profiles import Tier
from tests.cases.notation import DEFAULT_BLOCK_SIZE, Json, NotationError, TokenItem, parse_tokens

_SPELLINGS: dict[Tier, str] = {
    "gpu": "GPU DEVICE",
    "host": "HOST CPU CPU_PINNED CPU_TIER1",
    "disk": "CPU_TIER2 DISK STORAGE NVME SSD FS SHARED_STORAGE",
    "pool": "SHARED POOL EXTERNAL NETWORK REMOTE OBJ OBJECT_STORE",
}
_TIERS: dict[str, Tier] = {name: tier for tier, names in _SPELLINGS.items() for name in names.split()}
_MAX_TOKEN = (1 << 63) - 1
_MAX_GROUP = 64
_lists = msgspec.json.Decoder(list[dict[str, Any]])


class Dialect(msgspec.Struct, frozen=True):
    """What must be known of a publisher to read its events."""

    adapters: dict[str, str] = {}  # id -> name
    pairs: bool = False  # drafts with EAGLE: one token more than its blocks hold
    parent_zero: str = "root"  # root, unknown, or hash

    def decode(self, sequence: int, data: bytes) -> Decoded:
        """Return what a message's events say; refused ones are listed beside the others.

        Raises:
            FrameError: the message is no list of events.
        """
        try:
            listed = _lists.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise FrameError("batch_malformed", str(error)) from error
        events: list[EngineEvent] = []
        rejects: list[Reject] = []
        for position, event in enumerate(listed):
            try:
                events += self._events(event)
            except Refused as refused:
                rejects.append(Reject(refused.reason, position, refused.detail))
            except (NotationError, KeyError, TypeError, ValueError) as error:
                rejects.append(Reject(RejectReason.MALFORMED, position, str(error)))
        return Decoded(sequence, 0.0, None, tuple(events), tuple(rejects))

    def _events(self, event: Json) -> Iterator[EngineEvent]:
        match event.get("op"):
            case "store":
                yield self._stored(event)
            case "remove":
                hashes = _hashes(event)
                yield Removed(
                    hashes=hashes, tier=_tier(event), group=_group(event), remaining=_left(event, len(hashes))
                )
            case "clear":
                scoped = event.get("tier") is not None or event.get("medium") is not None
                yield Cleared(tier=_tier(event) if scoped else None)
            case unknown:
                raise Refused(RejectReason.UNKNOWN_EVENT, f"op: {unknown!r}")

    def _stored(self, event: Json) -> Stored:
        hashes = _hashes(event)
        if event.get("tok") is None:
            return Stored(hashes=hashes, tier=_tier(event), group=_group(event))
        size = event.get("bs", DEFAULT_BLOCK_SIZE)
        tokens, pairs = self._tokens(parse_tokens(event["tok"]), len(hashes) * size)
        check_tokens(tokens[:-1] if pairs else tokens, size, len(hashes), _MAX_TOKEN, masked=True)
        adapter, known = self._adapter(event)
        parent, parent_known = self._parent(event)
        media = _media(event, len(hashes))
        return Stored(
            hashes=hashes,
            parent=parent,
            parent_known=parent_known,
            tokens=tokens,
            block_size=size,
            tier=_tier(event),
            group=_group(event),
            adapter=adapter,
            salt=event.get("salt"),
            namespace_known=known,
            media=media if any(media) else (),
            pairs=pairs,
        )

    def _tokens(self, items: list[TokenItem], whole: int) -> tuple[list[int], bool]:
        tokens, pairs = unfold_pairs(items, DEFAULT_BLOCK_SIZE)
        return tokens, pairs or (self.pairs and len(tokens) == whole + 1)

    def _adapter(self, event: Json) -> tuple[str | None, bool]:
        """Return the adapter's name and whether it is known; an id is only looked up in the publisher's own list."""
        if event.get("lora") is not None:
            return event["lora"], True
        if event.get("lora_id") is None:
            return None, True
        name = self.adapters.get(str(event["lora_id"]))
        return name, name is not None

    def _parent(self, event: Json) -> tuple[EngineHash | None, bool]:
        parent = event.get("parent")
        if parent is None or (parent == 0 and self.parent_zero == "root"):
            return None, True
        if parent == 0 and self.parent_zero == "unknown":
            return None, False
        return _hash(parent), True


def tier_named(name: str | None) -> Tier:
    """Return the tier of a spelling, whoever uses it; one that nobody knows is never taken for GPU."""
    return _TIERS.get(name.upper(), "other") if name else "gpu"


def _tier(event: Json) -> Tier:
    return tier_named(event["medium"] if "medium" in event else event.get("tier"))


def _group(event: Json) -> int:
    group = event.get("group") or 0
    if type(group) is not int or not 0 <= group < _MAX_GROUP:
        raise Refused(RejectReason.GROUP, f"group: {group!r}")
    return group


def _hashes(event: Json) -> tuple[EngineHash, ...]:
    names = event["h"]
    return tuple(_hash(name) for name in (names if isinstance(names, list) else [names]))


def _hash(name: int | str) -> EngineHash:
    """Return a number as the 64 bits that it stands for, and letters as a name that is kept whole."""
    if isinstance(name, str):
        return b"letters:" + name.encode()
    return normalize_hash(name, 64)


def _left(event: Json, hashes: int) -> tuple[int, ...] | None:
    left = event.get("left")
    if left is None:
        return None
    counts = tuple(left) if isinstance(left, list) else (left,) * hashes
    if len(counts) != hashes or any(type(count) is not int or count < 0 for count in counts):
        raise Refused(RejectReason.MALFORMED, f"left: {left!r} for {hashes} blocks")
    return counts


def _media(event: Json, blocks: int) -> tuple[tuple[MediaKey, ...], ...]:
    """Return each block's pictures: the notation tells their order in the block, and no offsets."""
    listed = event.get("mm") or []
    if len(listed) > blocks:
        raise Refused(RejectReason.EXTRA_KEYS, f"mm: {len(listed)} for {blocks} blocks")
    keys = [tuple(MediaKey(name, order) for order, name in enumerate(_ids(item))) for item in listed]
    return (*keys, *((),) * (blocks - len(keys)))


def _ids(item: Any) -> list[str]:
    items = item if isinstance(item, list) else [] if item is None else [item]
    return [str(part["id"]) if isinstance(part, Mapping) else str(part) for part in items]
