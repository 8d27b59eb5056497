"""The notation of the cases: one JSON value a line in, typed steps out.

A field that nobody here knows is noted and changes nothing; a question that nobody here can answer fails its case.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

DEFAULT_BLOCK_SIZE = 4
DRAINED = "trtllm"
"""What `Body.engine` says of a list of events that TensorRT-LLM was asked for (engines/other-engines.md 2.1)."""

Json = Mapping[str, Any]
TokenItem = int | tuple[int, int]

_MAX_TOKENS = 1 << 24
_WHO = {"from", "rank", "inc", "uid"}
_MESSAGE = {*_WHO, "seq", "seq_bytes", "via", "engine", "eagle", "ev", "raw", "hex", "payload"}
_SNAPSHOT_SEQUENCE = ("seq", "upto", "up_to", "as_of", "through", "last", "at")
_CONTROL = {*_WHO, "ctl", "asked", "msgs", "end", "replica"}
_MATCH = {"ask", "tok", "lora", "salt", "mm", "want"}
_EVENT = {
    "store": {"op", "h", "tok", "parent", "bs", "tier", "medium", "group", "lora", "lora_id", "salt", "mm"},
    "remove": {"op", "h", "tier", "medium", "group", "left"},
    "clear": {"op", "tier", "medium"},
}


class NotationError(ValueError):
    """A line that is not of the notation; the message names the place."""


class Body(msgspec.Struct, frozen=True):
    """What a message carries: the bytes that an engine sent, or (no engine) the notation's own events as JSON."""

    data: bytes
    engine: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What the relay heard from one publisher."""

    sender: str
    body: Body
    rank: int = 0
    sequence: int | None = None  # None: the next one
    inc: int | None = None
    uid: str | None = None
    via: str = ""

    @property
    def logged(self) -> bool:
        """Return whether it comes from an at-least-once log, behind the relay."""
        return self.via.startswith("log")


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened beside the streams."""

    name: str
    sender: str | None
    rank: int | None = None  # None: all of the replica's
    inc: int | None = None
    uid: str | None = None
    asked: int = 0  # of a replay
    messages: tuple[Message, ...] = ()  # of a replay or, one of them, a snapshot
    ended: bool = False  # the replay's end mark came


class Picture(NamedTuple):
    """A picture in a question, in absolute tokens."""

    id: str
    at: int
    length: int


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is reusable, and what must be answered, by `replica/rank`."""

    tokens: tuple[int, ...]
    want: Json
    adapter: str | None = None
    salt: str | None = None
    pictures: tuple[Picture, ...] = ()


class Stats(msgspec.Struct, frozen=True):
    """What the index holds, by `replica/rank`."""

    want: Json


class Unanswerable(msgspec.Struct, frozen=True):
    """A question that a harness of its own must answer."""

    question: str


class Words(msgspec.Struct, frozen=True):
    """A line that describes a scenario in words."""

    keys: tuple[str, ...]


Step = Message | Control | Match | Stats | Unanswerable | Words


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a case file."""

    id: str
    kind: str
    title: str = ""
    profile: dict[str, Any] | None = None
    steps: list[dict[str, Any]]


_cases = msgspec.json.Decoder(Case)


def read_cases(path: Path) -> list[Case]:
    """Return the cases of a file.

    Raises:
        NotationError: a line that is no case.
    """
    cases: list[Case] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                cases.append(_cases.decode(line))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise NotationError(f"{path.name}:{number}: {error}") from error
    return cases


def read_steps(case: Case, unread: list[str]) -> list[Step]:
    """Return what happens in a case; fields that nobody here knows are noted in `unread`.

    Raises:
        NotationError: a step that is not of the notation.
    """
    steps: list[Step] = []
    for number, line in enumerate(case.steps):
        try:
            steps.append(_step(line, f"steps[{number}]", unread))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise NotationError(f"{case.id}: steps[{number}]: {error!r}") from error
    return steps


def parse_tokens(value: Any) -> list[TokenItem]:
    """Return the tokens of `"1..4"`, 5, or an array of those; two numbers in an array of their own are a pair."""
    items: list[TokenItem] = []
    for item in value if isinstance(value, list) else [value]:
        match item:
            case bool():
                raise NotationError(f"tok: {item!r}")
            case int():
                items.append(item)
            case str():
                items += _range(item)
            case [int() as first, int() as second]:
                items.append((first, second))
            case _:
                raise NotationError(f"tok: {item!r}")
    return items


def flat_tokens(value: Any) -> list[int]:
    """Return tokens that hold no pairs."""
    items = parse_tokens(value)
    tokens = [item for item in items if isinstance(item, int)]
    if len(tokens) != len(items):
        raise NotationError("tok: pairs in a question")
    return tokens


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    try:
        start, stop = int(first), int(last if dots else first) + 1
    except ValueError as error:
        raise NotationError(f"tok: {text!r}") from error
    if stop - start > _MAX_TOKENS:
        raise NotationError(f"tok: {text!r} is too long")
    return range(start, stop)


# ---- steps


def _step(line: Json, place: str, unread: list[str]) -> Step:
    match line:
        case {"ctl": str()}:
            return _control(line, place, unread)
        case {"ask": "match"}:
            _note(line, _MATCH, place, unread)
            tokens = flat_tokens(line["tok"])
            return Match(
                tokens=tuple(tokens),
                want=line["want"],
                adapter=line.get("lora"),
                salt=line.get("salt"),
                pictures=tuple(_pictures(line.get("mm"), tokens)),
            )
        case {"ask": "stats"}:
            return Stats(line["want"])
        case {"ask": _}:
            return Unanswerable(str(line["ask"]))
        case {"from": str()} if line.keys() & {"ev", "raw", "hex", "seq_bytes"}:
            return _message(line, place, unread)
    return Words(tuple(line))


def _message(line: Json, place: str, unread: list[str]) -> Message:
    _note(line, _MESSAGE, place, unread)
    raw = line.get("raw")
    told = raw if isinstance(raw, Mapping) else {}  # a drained event says its rank itself
    sequence = line.get("seq")
    if "seq_bytes" in line:
        sequence = int.from_bytes(bytes.fromhex(line["seq_bytes"]), "big")
    return Message(
        sender=line["from"],
        body=_body(line, place, unread),
        rank=line.get("rank", told.get("attention_dp_rank") or 0),
        sequence=sequence,
        inc=line.get("inc"),
        uid=line.get("uid"),
        via=line.get("via") or "",
    )


def _body(line: Json, place: str, unread: list[str]) -> Body:
    if not line.keys() & {"raw", "hex", "ev"}:
        return Body(bytes.fromhex(line.get("payload") or ""), line.get("engine") or "")  # an end mark has none
    engine = line.get("engine") or "vllm"
    if "raw" in line:
        return _raw_body(_with_bytes(line["raw"]), engine)
    if "hex" in line:
        return Body(bytes.fromhex(line["hex"]), engine)
    for number, event in enumerate(line["ev"]):
        known = _EVENT.get(event.get("op"))
        if known is None:
            unread.append(f"{place}.ev[{number}].op: {event.get('op')}")
        else:
            _note(event, known, f"{place}.ev[{number}]", unread)
    return Body(msgspec.json.encode(line["ev"]))


def _raw_body(value: Any, engine: str) -> Body:
    """Return a value as the engine sends it: JSON where TensorRT-LLM is asked for events, else msgpack."""
    if engine != "trtllm":
        return Body(msgspec.msgpack.encode(value), engine)
    if isinstance(value, dict):
        return Body(msgspec.json.encode([value]), DRAINED)
    if value and isinstance(value[0], dict):
        return Body(msgspec.json.encode(value), DRAINED)
    return Body(msgspec.msgpack.encode(value), "trtllm_zmq")


def _control(line: Json, place: str, unread: list[str]) -> Control:
    messages = line.get("msgs") or []
    sender = line.get("from") or line.get("replica") or next((m["from"] for m in messages if "from" in m), None)
    if line["ctl"] == "snapshot" and sender is not None:
        told = [_snapshot(line, sender, place, unread)]
    else:
        _note(line, _CONTROL, place, unread)
        told = [_message({"from": sender, **message}, place, unread) for message in messages]
    return Control(
        name=line["ctl"],
        sender=sender,
        rank=line.get("rank"),
        inc=line.get("inc"),
        uid=line.get("uid"),
        asked=line.get("asked", next((message.sequence or 0 for message in told), 0)),
        messages=tuple(told),
        ended=bool(line.get("end", True)),
    )


def _snapshot(line: Json, sender: str, place: str, unread: list[str]) -> Message:
    """Return a listing of all that the publisher has, as one message with the last sequence that it covers."""
    stores: list[Json] = []
    for value in line.values():
        for item in value if isinstance(value, list) else ():
            if isinstance(item, Mapping):
                stores += item.get("ev", [{"op": "store", **item}])
    sequence = next((line[name] for name in _SNAPSHOT_SEQUENCE if isinstance(line.get(name), int)), None)
    return _message({"from": sender, "rank": line.get("rank", 0), "seq": sequence, "ev": stores}, place, unread)


def _pictures(value: Any, tokens: list[int]) -> Iterator[Picture]:
    """Yield the pictures of a question: spans, or ids for each block as events have them."""
    for number, item in enumerate(value or ()):
        if isinstance(item, Mapping):
            at = item["at"]
            yield Picture(item["id"], at, item.get("len") or _equal_run(tokens, at))
        else:
            for name in [item] if isinstance(item, str) else item or ():
                yield Picture(name, number * DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)


def _equal_run(tokens: list[int], at: int) -> int:
    """Return how often the token at this place is repeated."""
    stop = at
    while stop < len(tokens) and tokens[stop] == tokens[at]:
        stop += 1
    return max(1, stop - at)


def _with_bytes(value: Any) -> Any:
    """Return the value with each {"hex": …} or {"bin": …}, which JSON has no type for, as bytes."""
    match value:
        case {"hex": str() as text} | {"bin": str() as text} if len(value) == 1:
            return bytes.fromhex(text)
        case dict():
            return {key: _with_bytes(item) for key, item in value.items()}
        case list():
            return [_with_bytes(item) for item in value]
    return value


def _note(line: Json, known: set[str], place: str, unread: list[str]) -> None:
    unread += [f"{place}.{name}" for name in line if name not in known]
