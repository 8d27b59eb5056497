"""The shapes of questions and answers over HTTP (DESIGN 9); names are fixed, fields may be added."""

from collections.abc import Mapping

import msgspec
import pybase64

from index.hashing import Media, Tokens, pack_hashes, pack_tokens
from index.lookup import Prompt
from schemas.errors import BadRequest
from schemas.profiles import TIERS

MAX_PROMPT_TOKENS = 1 << 22  # a router does nothing else while it hashes one
MAX_MEDIA = 4096
MAX_COVERED = 8  # times its length that the spans of a prompt may cover it, one over another
MAX_REPLICAS = 4096
MAX_QUOTED = 200  # characters of a caller's text in a refusal
_U64 = (1 << 64) - 1


class MediaSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A picture, sound or embedding in the prompt, in absolute tokens."""

    id: str
    offset: int
    length: int


class PriceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/price`: exactly one of the four forms of a prompt."""

    model: str
    token_ids: list[int] | None = None
    tokens_b64: str | None = None  # little-endian u32
    block_hashes: list[int] | None = None  # u64, of `block_size` tokens each
    block_hashes_b64: str | None = None  # little-endian u64
    prompt_tokens: int | None = None  # with block hashes: the prompt's length, if it is more than its whole blocks
    block_size: int | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    media: list[MediaSpan] = []
    replicas: list[str] | None = None  # only these


class ReplicaPrice(msgspec.Struct, kw_only=True):
    """One replica's (rank's) answer; tokens are raw, never weighted."""

    replica: str
    rank: int | None  # None: the gateway cannot pick one, and the numbers are the minimum over them
    state: str
    cached_tokens: dict[str, int]  # by tier, of the one unbroken run; sums to reusable_tokens
    pools: dict[str, dict[str, int]] = {}
    reusable_tokens: int = 0
    reusable_tokens_max: int | None = None  # over the ranks, where the gateway cannot pick
    optimistic_tokens: int = 0
    upper_bound: bool = False
    uncached_tokens: int = 0
    price_ms: float | None = None
    terms: dict[str, float] = {}
    reasons: list[str] = []


class PriceAnswer(msgspec.Struct, kw_only=True):
    """The answer to `POST /v1/price`."""

    model: str
    prompt_tokens: int
    best: str | None  # replica/rank
    reject: str | None = None
    replicas: list[ReplicaPrice]


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """One holder in `GET /v1/replicas`."""

    replica: str
    rank: int | None
    state: str
    reasons: list[str]
    engine: str
    version: str
    unit: int
    life: int
    record_sequence: int
    received: dict[str, int]  # source -> last engine sequence that reached the relay
    applied: dict[str, int]  # source -> last engine sequence in the index
    share_known: float
    age_s: float | None  # since its relay's last heartbeat


class Replicas(msgspec.Struct, kw_only=True):
    """One model in `GET /v1/replicas`."""

    model: str
    index: str  # `ready`, or why nothing is known
    replicas: list[ReplicaStatus]


NO_TOKENS: dict[str, int] = dict.fromkeys(TIERS, 0)

_price_requests = msgspec.json.Decoder(PriceRequest)
encode = msgspec.json.Encoder().encode


def parse_price(body: bytes) -> tuple[Prompt, list[str] | None]:
    """Return the prompt and the replicas asked about, from a JSON body.

    Raises:
        BadRequest: the message names the field, its position and its value's type or bound.
    """
    try:
        request = _price_requests.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: not JSON: {error}") from error
    return _prompt(request), _asked(request.replicas)


def parse_raw(body: bytes, query: Mapping[str, str]) -> tuple[Prompt, list[str] | None]:
    """Return the prompt of an `application/octet-stream` body: little-endian u32 tokens; the rest is in the query."""
    if "model" not in query:
        raise BadRequest("query: `model` is missing")
    unknown = set(query) - {"model", "adapter", "cache_salt", "replicas"}
    if unknown:
        raise BadRequest(f"query: unknown field {quoted(min(unknown))}")
    tokens = _packed("body", body)
    replicas = _asked(query["replicas"].split(",") if "replicas" in query else None)
    prompt = Prompt(
        model=query["model"],
        prompt_tokens=tokens.token_count,
        tokens=tokens,
        adapter=query.get("adapter"),
        salt=query.get("cache_salt"),
    )
    return prompt, replicas


def quoted(text: str) -> str:
    """Return a caller's text as refusals show it."""
    return repr(text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}...")


def _asked(replicas: list[str] | None) -> list[str] | None:
    if replicas is not None and len(replicas) > MAX_REPLICAS:
        raise BadRequest(f"replicas: {len(replicas)} names, at most {MAX_REPLICAS}")
    return replicas


def _prompt(request: PriceRequest) -> Prompt:
    forms = ("token_ids", "tokens_b64", "block_hashes", "block_hashes_b64")
    given = [form for form in forms if getattr(request, form) is not None]
    if len(given) != 1:
        raise BadRequest(f"expected exactly one of {', '.join(forms)}, got {', '.join(given) or 'none'}")
    if request.block_hashes is not None or request.block_hashes_b64 is not None:
        return _prompt_of_hashes(request)
    if request.prompt_tokens is not None:
        raise BadRequest("prompt_tokens: goes with block hashes; tokens are counted")
    if request.token_ids is not None:
        _check_length("token_ids", len(request.token_ids))
        tokens = pack_tokens(request.token_ids)
    else:
        tokens = _packed("tokens_b64", _base64("tokens_b64", request.tokens_b64 or ""))
    return Prompt(
        model=request.model,
        prompt_tokens=tokens.token_count,
        tokens=tokens,
        adapter=request.adapter,
        salt=request.cache_salt,
        media=_media(request.media, tokens.token_count),
    )


def _prompt_of_hashes(request: PriceRequest) -> Prompt:
    if request.block_size is None or not 0 < request.block_size <= 1 << 20:
        raise BadRequest(f"block_size: block hashes need one from 1 to 2^20, got {request.block_size}")
    if request.media or request.adapter is not None or request.cache_salt is not None:
        raise BadRequest("media, adapter, cache_salt: block hashes already contain them")
    if request.block_hashes is not None:
        for position, block_hash in enumerate(request.block_hashes):
            if not 0 <= block_hash <= _U64:
                raise BadRequest(f"block_hashes[{position}]: expected an unsigned 64-bit integer, got {block_hash}")
        packed = pack_hashes(request.block_hashes)
    else:
        packed = _base64("block_hashes_b64", request.block_hashes_b64 or "")
        if len(packed) % 8:
            raise BadRequest(f"block_hashes_b64: {len(packed)} bytes are no whole number of u64")
    whole = len(packed) // 8 * request.block_size
    prompt_tokens = whole if request.prompt_tokens is None else request.prompt_tokens
    if not whole <= prompt_tokens < whole + request.block_size:
        raise BadRequest(f"prompt_tokens: {prompt_tokens} does not fit {len(packed) // 8} blocks")
    return Prompt(model=request.model, prompt_tokens=prompt_tokens, hashes=packed, block_size=request.block_size)


def _media(spans: list[MediaSpan], prompt_tokens: int) -> tuple[Media, ...]:
    if len(spans) > MAX_MEDIA:
        raise BadRequest(f"media: {len(spans)} spans, at most {MAX_MEDIA}")
    for position, span in enumerate(spans):
        if span.offset < 0 or span.length < 1 or span.offset + span.length > prompt_tokens:
            raise BadRequest(f"media[{position}]: tokens {span.offset}+{span.length} lie outside the prompt")
    covered = sum(span.length for span in spans)
    if covered > MAX_COVERED * prompt_tokens:
        raise BadRequest(f"media: spans of {covered} tokens cover {prompt_tokens} more than {MAX_COVERED} times")
    return tuple(Media(span.id, span.offset, span.length) for span in spans)


def _check_length(place: str, prompt_tokens: int) -> None:
    if prompt_tokens > MAX_PROMPT_TOKENS:
        raise BadRequest(f"{place}: {prompt_tokens} tokens, at most {MAX_PROMPT_TOKENS}")


def _packed(place: str, data: bytes) -> Tokens:
    if len(data) % 4:
        raise BadRequest(f"{place}: {len(data)} bytes are no whole number of little-endian u32 tokens")
    _check_length(place, len(data) // 4)
    return Tokens(data, wide=False)


def _base64(place: str, text: str) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise BadRequest(f"{place}: not base64: {error}") from error
