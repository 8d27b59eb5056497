"""What is known of a publisher before its first message: the case's profile, and what an operator would have set."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import msgspec

from relays.batches import MAX_BLOCK_SIZE
from relays.decoders import Decode, decoder_of
from relays.dialects import EngineSettings, profile_for
from relays.engine_events import Decoded, EngineEvent, Removed, Stored
from relays.trtllm import split_drain
from schemas.errors import ConfigError, FrameError
from schemas.profiles import Group, GroupKind, Profile
from schemas.vllm import SPEC_KINDS
from tests.cases.dialect import Dialect
from tests.cases.notation import DEFAULT_BLOCK_SIZE, DRAINED, Body, Control, Json, Message, Step

MODEL = "m"
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
"""The release whose payloads a case's `raw` stands for; decoders read older ones all the same."""

_KINDS = {
    **SPEC_KINDS,
    **dict.fromkeys(("full", "mla"), "full"),
    **dict.fromkeys(("swa", "window"), "window"),
    **dict.fromkeys(("state", "linear", "recurrent", "ssm"), "state"),
}
_DIALECT_FIELDS = {"adapters", "eagle", "placeholders", "parent_zero"}
_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, Body])


class NoDecoderError(Exception):
    """A raw payload of a dialect that no decoder reads yet."""


class Publisher(NamedTuple):
    """How one publisher's messages are read, and the profile that its mirrors begin with."""

    profile: Profile
    decode: Decode
    spans: bool  # its pictures come as spans, as engines tell them


def envelope(stamp: int, body: Body) -> bytes:
    """Return a message as the relay hears it: like an engine's, two of one content differ by their time."""
    return msgspec.msgpack.encode((stamp, body))


def body_of(payload: bytes) -> Body:
    """Return what such a message carries."""
    return _ENVELOPE.decode(payload)[1]


def publishers_of(facts: Json, steps: Sequence[Step], unread: list[str]) -> dict[str, Publisher]:
    """Return the publishers by name; fields of the case's profile (`facts`) that nobody here knows are noted.

    Raises:
        NoDecoderError: a publisher speaks a dialect without decoder.
    """
    messages: dict[str, list[Message]] = {}
    for step in steps:
        for message in [step] if isinstance(step, Message) else step.messages if isinstance(step, Control) else ():
            messages.setdefault(message.sender, []).append(message)
    return {
        sender: _publisher(sender, _facts_of(sender, messages.keys(), facts), heard, unread)
        for sender, heard in messages.items()
    }


def _facts_of(sender: str, senders: Collection[str], facts: Json) -> dict[str, Any]:
    """Return what the profile says of one publisher; a fact may be given for some of them by name."""
    own: dict[str, Any] = {}
    for name, fact in facts.items():
        if isinstance(fact, Mapping) and not fact.keys().isdisjoint(senders):
            if sender in fact:
                own[name] = fact[sender]
        elif isinstance(fact, list) and name == "eagle":
            own[name] = sender in fact
        else:
            own[name] = fact
    return own


def _publisher(sender: str, facts: Json, messages: Sequence[Message], unread: list[str]) -> Publisher:
    dialect = Dialect(
        adapters={str(key): name for key, name in (facts.get("adapters") or {}).items() if isinstance(name, str)},
        pairs=bool(facts.get("eagle")),
        parent_zero=facts.get("parent_zero") or "root",
    )
    plain = Profile(
        model=MODEL,
        name=sender,
        engine="vllm",
        version=VERSIONS["vllm"],
        dialect="vllm",
        unit=0,
        alignment=0,
        adapters=dialect.adapters,
        placeholders=tuple(facts.get("placeholders") or ()),
        drafting="pairs" if dialect.pairs else "none",
    )
    drained = [message.body.data for message in messages if message.body.engine == DRAINED]
    if drained:
        pulled = profile_for("trtllm", MODEL, sender, "1.0", EngineSettings())
        plain = msgspec.structs.replace(plain, removal=pulled.removal, cascade=pulled.cascade)
    profile = _with_facts(plain, facts, unread)
    engines = {message.body.engine for message in messages} - {""}
    decoders = {engine: _decoder(profile, engine, _tokens_per_block(drained)) for engine in engines}
    decode = partial(_decode, dialect, decoders)
    told = [event for message in messages for event in _events(decode, message)]
    return Publisher(_configured(profile, facts.get("groups") or {}, told), decode, bool(decoders))


def _decode(dialect: Dialect, decoders: Mapping[str, Decode], sequence: int, payload: bytes) -> Decoded:
    body = body_of(payload)
    return decoders[body.engine](sequence, body.data) if body.engine else dialect.decode(sequence, body.data)


def _decoder(profile: Profile, dialect: str, unit: int) -> Decode:
    """Return what reads an engine's payloads; the hashes in them stand for any value, so none is recomputed."""
    version = VERSIONS.get(dialect, "1.0")
    spoken = msgspec.structs.replace(
        profile, engine=dialect, dialect=dialect, version=version, unit=unit, hidden_namespaces=("salt", "adapter")
    )
    try:
        return decoder_of(spoken)
    except ConfigError as error:
        raise NoDecoderError(str(error)) from error


def _tokens_per_block(drained: Iterable[bytes]) -> int:
    """Return what TensorRT-LLM's events do not say and its operator knows: the tokens of a full block."""
    counts: list[int] = []
    for data in drained:
        with suppress(msgspec.DecodeError, TypeError, AttributeError, KeyError):
            blocks = [block for event in msgspec.json.decode(data) for block in event["data"].get("blocks", ())]
            counts += [len(block["tokens"]) for block in blocks]
    return max(counts, default=DEFAULT_BLOCK_SIZE)


def _events(decode: Decode, message: Message) -> list[EngineEvent]:
    """Return what a message says, whenever it is heard."""
    bodies = [message.body]
    events: list[EngineEvent] = []
    with suppress(FrameError):
        if message.body.engine == DRAINED:
            bodies = [Body(event.payload, DRAINED) for event in split_drain(message.body.data)[0]]
        for body in bodies:
            events += decode(0, envelope(0, body)).events
    return events


def _configured(profile: Profile, kinds: Json, told: list[EngineEvent]) -> Profile:
    """Return the profile with what an operator knows of the engine: block sizes, groups, whether hashes come alone."""
    sizes: dict[int, int] = {}  # group -> tokens of a block
    unit = 0
    for event in told:
        if isinstance(event, Stored) and 0 < event.block_size <= MAX_BLOCK_SIZE:
            unit = gcd(unit, event.block_size)
            sizes.setdefault(event.group, event.block_size)
    spoken = {event.group for event in told if isinstance(event, Stored | Removed)}
    groups: list[Group] = []
    for index in sorted(int(key) for key in kinds):
        if index in spoken:
            groups.append(_group(index, kinds[str(index)], sizes.get(index, unit or DEFAULT_BLOCK_SIZE)))
    return msgspec.structs.replace(
        profile,
        unit=unit,
        groups=tuple(groups),
        hash_only_stores=profile.hash_only_stores or any(isinstance(e, Stored) and not e.tokens for e in told),
        upper_bound=profile.upper_bound or len(groups) < len(kinds),  # classes that its events never speak of
    )


def _group(index: int, fact: Json, size: int) -> Group:
    kind: GroupKind = _KINDS.get(str(fact.get("kind", "full")), "full")  # type: ignore[assignment]  # its values are
    return Group(
        index, kind, fact.get("bs", fact.get("block_size", size)), fact.get("window") if kind == "window" else None
    )


def _with_facts(profile: Profile, facts: Json, unread: list[str]) -> Profile:
    """Return the profile with the case's other fields, which are named as the product names them."""
    known = {field.name: field for field in msgspec.structs.fields(Profile)}
    for name, fact in facts.items():
        if name in _DIALECT_FIELDS or name == "groups":
            continue
        value = _removal(fact) if name == "removal" else fact
        try:
            profile = msgspec.structs.replace(profile, **{name: msgspec.convert(value, known[name].type)})
        except (KeyError, msgspec.ValidationError):
            place = f"profile.{name}"
            if place not in unread:
                unread.append(place)
    return profile


def _removal(value: Any) -> Any:
    """Return the product's word for how removals are sent: once a copy, or once for what is left."""
    return value if value in ("per_copy", "one_for_all_tiers") else "one_for_copies"
