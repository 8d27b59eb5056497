"""What a simulated server's HTTP requests and answers look like, vLLM's own, and the words all of them speak; pure.

Source: vLLM 0.32 entrypoints/openai/completion/protocol.py and entrypoints/serve/engine/protocol.py.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from index.hashing import pack_tokens
from ops.simulator.chain import Adapter
from ops.simulator.engine import Finished, Request
from ops.simulator.settings import ServerSettings, SimulatorSettings
from schemas.errors import BadRequest

VOCABULARY = 32_000
_MAX_TOKEN = (1 << 32) - 1


class Completion(msgspec.Struct):
    """The body of POST /v1/completions; fields that are not listed change nothing."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    n: int | None = None


class Choice(msgspec.Struct):
    """One generated text."""

    text: str
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    index: int = 0
    logprobs: None = None
    finish_reason: str = "length"
    stop_reason: None = None


class PromptDetails(msgspec.Struct):
    """How much of the prompt was in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionAnswer(msgspec.Struct):
    """The answer of POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "text_completion"


class ModelCard(msgspec.Struct):
    """The model, or one adapter."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "vllm"


class Problem(msgspec.Struct):
    """Why a request was refused."""

    message: str
    type: str
    code: int
    param: str | None = None


Body = TypeVar("Body", bound=Completion)

_completions = msgspec.json.Decoder(Completion)


def parse_completion(body: bytes) -> Completion:
    """Return the request.

    Raises:
        BadRequest: it is no such request, or wants what is not simulated; the message names the field.
    """
    return read_completion(body, _completions)


def read_completion(body: bytes, decoder: "msgspec.json.Decoder[Body]") -> Body:
    """Return a request of an engine's own kind.

    Raises:
        BadRequest: it is no such request, or wants what is not simulated; the message names the field.
    """
    try:
        completion = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"body: {error}") from error
    if completion.stream:
        raise BadRequest("stream: true is not simulated")
    if completion.n not in (None, 1):
        raise BadRequest(f"n: {completion.n}: only one choice is simulated")
    if completion.max_tokens is not None and completion.max_tokens < 1:
        raise BadRequest(f"max_tokens: {completion.max_tokens} is less than 1")
    if completion.cache_salt == "":
        raise BadRequest("cache_salt: is empty")
    return completion


def engine_request(request_id: str, completion: Completion, settings: SimulatorSettings) -> Request | None:
    """Return what the engine is asked, or None where no model or adapter has that name."""
    adapter = None
    if completion.model not in (None, settings.model):
        adapter = next((known for known in adapters_of(settings) if known.name == completion.model), None)
        if adapter is None:
            return None
    tokens, generated = words_of(completion, settings.model_len)
    return Request(request_id, tokens, generated, adapter, completion.cache_salt)


def words_of(completion: Completion, longest: int) -> tuple[list[int], list[int]]:
    """Return a request's prompt, and what is generated for it.

    Raises:
        BadRequest: more is asked for than `longest` tokens, or a token is none.
    """
    tokens = tokens_of(completion.prompt) if isinstance(completion.prompt, str) else completion.prompt
    count = 16 if completion.max_tokens is None else completion.max_tokens
    if count > longest:
        raise BadRequest(f"max_tokens: {count} is more than {longest}")
    for position, token in enumerate(tokens):
        if not 0 <= token <= _MAX_TOKEN:
            raise BadRequest(f"prompt[{position}]: {token} is no token")
    return tokens, completion_of(tokens, count)


def answer_of(finished: Finished, completion: Completion, model: str, created_s: int) -> CompletionAnswer:
    """Return the answer in OpenAI's shape."""
    request = finished.request
    wants_ids = bool(completion.return_token_ids)
    choice = Choice(
        text=text_of(request.completion),
        token_ids=list(request.completion) if wants_ids else None,
        prompt_token_ids=list(request.tokens) if wants_ids else None,
    )
    usage = usage_of(request.tokens, request.completion, finished.cached_tokens)
    return CompletionAnswer(f"cmpl-{request.id}", created_s, model, [choice], usage)


def usage_of(tokens: Sequence[int], generated: Sequence[int], cached_tokens: int) -> Usage:
    """Return the token counts."""
    prompt, count = len(tokens), len(generated)
    return Usage(prompt, count, prompt + count, PromptDetails(cached_tokens))


def model_cards(settings: ServerSettings, created_s: int, model_len: int, owner: str = "vllm") -> list[ModelCard]:
    """Return the model and its adapters."""
    base = ModelCard(settings.model, created_s, settings.model, None, model_len, owned_by=owner)
    adapters = settings.adapters.items()
    return [base, *(ModelCard(name, created_s, path, settings.model, None, owned_by=owner) for name, path in adapters)]


def adapters_of(settings: SimulatorSettings) -> list[Adapter]:
    """Return the adapters, numbered in their order."""
    return [Adapter(name, number, path) for number, (name, path) in enumerate(settings.adapters.items(), 1)]


def tokens_of(text: str) -> list[int]:
    """Return one token a word: `t17` is 17, any other word is hashed."""
    return [_token_of(word) for word in text.split()]


def text_of(tokens: Sequence[int]) -> str:
    """Return words that `tokens_of` turns into these tokens again."""
    return " ".join(f"t{token}" for token in tokens)


def completion_of(tokens: Sequence[int], count: int) -> list[int]:
    """Return generated tokens, each a hash of all before it: a longer prompt goes on where a shorter one led."""
    state = xxh3_64(bytes(pack_tokens(tokens).data))
    generated: list[int] = []
    for _ in range(count):
        token = state.intdigest() % VOCABULARY
        generated.append(token)
        state.update(token.to_bytes(4, "little"))
    return generated


def _token_of(word: str) -> int:
    if word[0] == "t" and word[1:].isascii() and word[1:].isdigit() and len(word) < 10 and int(word[1:]) < VOCABULARY:
        return int(word[1:])
    return xxh3_64_intdigest(word.encode()) % VOCABULARY
