"""What SGLang's HTTP requests and answers look like; pure.

Source: entrypoints/openai/protocol.py, serving_base.py, serving_completions.py and usage_processor.py, and
managers/scheduler_components/output_streamer.py of the 0.5.23 wheel; run with --enable-cache-report.
"""

import hashlib

import msgspec

from ops.simulator.api import Completion, Usage, read_completion, text_of, usage_of, words_of
from ops.simulator.sglang.dialect import Dialect
from ops.simulator.sglang.pages import Namespace
from ops.simulator.sglang.requests import Finished, Request
from ops.simulator.sglang.settings import SglangSettings
from schemas.errors import BadRequest


class SglangCompletion(Completion):
    """The body of POST /v1/completions; fields that are not listed change nothing."""

    extra_key: str | None = None  # a namespace of the caller's own
    lora_path: str | None = None  # an adapter's name, where `model` names none (`base:adapter`)
    return_cached_tokens_details: bool = False
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # its older name


class SglangChoice(msgspec.Struct, omit_defaults=True):
    """One generated text; token ids are there where asked for."""

    index: int
    text: str
    logprobs: None
    finish_reason: str
    matched_stop: None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CachedTokensDetails(msgspec.Struct):
    """Where cached tokens came from."""

    device: int
    host: int


class SglExt(msgspec.Struct):
    """What SGLang adds to OpenAI's answer."""

    cached_tokens_details: CachedTokensDetails


class SglangAnswer(msgspec.Struct, omit_defaults=True):
    """The answer of POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[SglangChoice]
    usage: Usage
    object: str
    sglext: SglExt | None = None


_completions = msgspec.json.Decoder(SglangCompletion)


def parse_completion(body: bytes) -> SglangCompletion:
    """Return the request.

    Raises:
        BadRequest: it is no such request, or wants what is not simulated; the message names the field.
    """
    return read_completion(body, _completions)


def engine_request(
    request_id: str, completion: SglangCompletion, settings: SglangSettings, dialect: Dialect
) -> Request | None:
    """Return what the engine is asked, or None where no adapter has that name; a model's name is not looked at."""
    adapter = adapter_of(completion, settings.model)
    if adapter is not None and adapter not in settings.adapters:
        return None
    tokens, generated = words_of(completion, settings.longest)
    return Request(request_id, tokens, generated, namespace_of(completion, adapter, dialect))


def adapter_of(completion: SglangCompletion, model: str) -> str | None:
    """Return the adapter that a request names: behind the model's name, or else on its own."""
    named = completion.model or ""
    if ":" not in named or named == model:
        return completion.lora_path
    rest = named[len(model) + 1 :] if named.startswith(f"{model}:") else named.split(":", 1)[1]
    return rest.strip() or completion.lora_path


def namespace_of(completion: SglangCompletion, adapter: str | None, dialect: Dialect) -> Namespace:
    """Return whose pages a request can share; up to 0.5.17 a salt is the beginning of the extra key."""
    salt = completion.cache_salt if dialect.salts else None
    parts = ["" if dialect.salts else completion.cache_salt or "", completion.extra_key or ""]
    if adapter is not None:
        parts.append(adapter_id(adapter))
    return Namespace("".join(parts) or None, salt, adapter)


def adapter_id(name: str) -> str:
    """Return the id of an adapter, 32 hex digits; a real one is random for each load."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def wanted_rank(completion: SglangCompletion, header: str | None) -> int | None:
    """Return the rank that a request names, in its header first; None: any.

    Raises:
        BadRequest: the header is no number.
    """
    if header is None:
        return completion.data_parallel_rank if completion.routed_dp_rank is None else completion.routed_dp_rank
    try:
        return int(header)
    except ValueError as error:
        raise BadRequest(f"X-Data-Parallel-Rank: {header!r} is no number") from error


def answer_of(finished: Finished, completion: SglangCompletion, model: str, created_s: int) -> SglangAnswer:
    """Return the answer in OpenAI's shape; the details of what was cached only where asked for, and where any was."""
    request, extension = finished.request, None
    if completion.return_cached_tokens_details and finished.cached_tokens:
        device = finished.cached_tokens - finished.host_tokens
        extension = SglExt(CachedTokensDetails(device, finished.host_tokens))
    choice = SglangChoice(0, text_of(request.completion), None, "length", None)
    if completion.return_token_ids:
        choice.token_ids, choice.prompt_token_ids = list(request.completion), list(request.tokens)
    usage = usage_of(request.tokens, request.completion, finished.cached_tokens)
    return SglangAnswer(request.id, created_s, model, [choice], usage, "text_completion", extension)
