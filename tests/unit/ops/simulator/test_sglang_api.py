"""The simulated SGLang server's requests, answers and settings."""

import msgspec
import pytest

from ops.simulator.sglang.api import adapter_id, answer_of, engine_request, parse_completion, wanted_rank
from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.pages import Namespace
from ops.simulator.sglang.requests import Finished, Request
from ops.simulator.sglang.settings import SglangSettings
from schemas.errors import BadRequest, ConfigError

SETTINGS = SglangSettings(model="org/base", adapters={"sql": "loras/sql"}, pages=10, page_size=16)
ID = adapter_id("sql")


def asked(body: bytes, version: str = "0.5.23") -> Request | None:
    return engine_request("a", parse_completion(body), SETTINGS, dialect_of(version))


@pytest.mark.parametrize(
    ("body", "namespace"),
    [
        (b'{"prompt": "x"}', Namespace()),
        (b'{"prompt": "x", "model": "whatever"}', Namespace()),
        (b'{"prompt": "x", "cache_salt": "s", "extra_key": "k"}', Namespace("k", "s")),
        (b'{"prompt": "x", "model": "org/base:sql"}', Namespace(ID, None, "sql")),
        (b'{"prompt": "x", "model": "other:sql", "extra_key": "k"}', Namespace("k" + ID, None, "sql")),
        (b'{"prompt": "x", "lora_path": "sql"}', Namespace(ID, None, "sql")),
    ],
)
def test_an_adapter_is_named_behind_the_model_or_on_its_own(body: bytes, namespace: Namespace) -> None:
    """A caller's extra key comes before the adapter's id; a salt is a part of its own."""
    request = asked(body)
    assert request is not None
    assert request.namespace == namespace


def test_up_to_0_5_17_a_salt_begins_the_extra_key() -> None:
    """The tree knew no salts then."""
    request = asked(b'{"prompt": "x", "cache_salt": "s", "extra_key": "k"}', "0.5.17")
    assert request is not None
    assert request.namespace == Namespace("sk")


def test_an_adapter_that_is_not_loaded_is_none() -> None:
    """The server answers 404."""
    assert asked(b'{"prompt": "x", "model": "org/base:french"}') is None


def test_a_header_names_the_rank_before_the_body_does() -> None:
    """Without either, any rank; a header that is no number is refused."""
    body = parse_completion(b'{"prompt": "x", "routed_dp_rank": 1}')
    assert wanted_rank(body, "2") == 2
    assert wanted_rank(body, None) == 1
    assert wanted_rank(parse_completion(b'{"prompt": "x", "data_parallel_rank": 3}'), None) == 3
    assert wanted_rank(parse_completion(b'{"prompt": "x"}'), None) is None
    with pytest.raises(BadRequest, match="no number"):
        wanted_rank(body, "two")


@pytest.mark.parametrize(
    ("cached", "host", "wanted", "details"),
    [
        (48, 16, True, {"cached_tokens_details": {"device": 32, "host": 16}}),
        (48, 16, False, None),
        (0, 0, True, None),
    ],
)
def test_cached_tokens_are_told_by_tier_where_asked_for(
    cached: int, host: int, *, wanted: bool, details: dict[str, object] | None
) -> None:
    """Usage has the sum in any case; the extension only where it says something."""
    body = parse_completion(msgspec.json.encode({"prompt": "x", "return_cached_tokens_details": wanted}))
    answer = answer_of(Finished(Request("a", [1], [2]), cached, host), body, "m", 7)
    written = msgspec.json.decode(msgspec.json.encode(answer))
    assert written["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert written.get("sglext") == details
    assert "token_ids" not in written["choices"][0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body"),
        (b'{"prompt": "x", "stream": true}', "stream"),
        (b'{"prompt": "x", "max_tokens": 161}', "more than 160"),
        (b'{"prompt": "x", "extra_key": ["a"]}', "extra_key"),
        (b'{"prompt": [1, -1]}', r"prompt\[1\]"),
    ],
)
def test_what_cannot_be_answered_names_the_field(body: bytes, message: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(BadRequest, match=message):
        asked(body)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SglangSettings(version="0.4.9"), "version"),
        (SglangSettings(version="0.5.20", event_format="dynamo"), "event_format"),
        (SglangSettings(page_size=0), "page_size"),
        (SglangSettings(pages=2), "pages"),
        (SglangSettings(host_pages=-1), "host_pages"),
        (SglangSettings(page_size=64, chunked_prefill_size=32), "chunked_prefill_size"),
        (SglangSettings(pages=10, context_length=161), "context_length"),
        (SglangSettings(model="m", adapters={"m": "p"}), "adapters"),
        (SglangSettings(replay_port=5558, data_parallel_size=2), "5558 is taken by events_port"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings: SglangSettings, message: str) -> None:
    """Before anything is bound."""
    with pytest.raises(ConfigError, match=message):
        settings.check()
