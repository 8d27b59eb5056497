"""The simulated server's requests, answers and words."""

import pytest

from ops.simulator.api import completion_of, engine_request, parse_completion, text_of, tokens_of
from ops.simulator.chain import Adapter
from ops.simulator.settings import SimulatorSettings
from schemas.errors import BadRequest, ConfigError

SETTINGS = SimulatorSettings(model="base", adapters={"french": "loras/french"}, blocks=11, block_size=16)


def test_text_is_one_token_a_word_and_comes_back() -> None:
    assert tokens_of(text_of([5, 31_999, 0])) == [5, 31_999, 0]
    assert len(tokens_of("  the the\ncat t t99999 ")) == 5
    assert tokens_of("the")[0] == tokens_of("the")[0] < 32_000


def test_a_longer_prompt_goes_on_where_a_shorter_one_led() -> None:
    prompt = [1, 2, 3]
    generated = completion_of(prompt, 6)
    assert completion_of(prompt + generated[:2], 4) == generated[2:]
    assert completion_of([1, 2, 4], 6) != generated


def test_an_adapter_is_chosen_by_the_models_name() -> None:
    completion = parse_completion(b'{"model": "french", "prompt": [1, 2], "max_tokens": 3, "cache_salt": "s"}')
    request = engine_request("a", completion, SETTINGS)
    assert request is not None
    assert request.adapter == Adapter("french", 1, "loras/french")
    assert (request.salt, len(request.completion)) == ("s", 3)


def test_a_model_that_nobody_serves_is_none() -> None:
    assert engine_request("a", parse_completion(b'{"model": "other", "prompt": "x"}'), SETTINGS) is None


def test_sixteen_tokens_are_generated_unless_told() -> None:
    request = engine_request("a", parse_completion(b'{"prompt": "x", "temperature": 0.5}'), SETTINGS)
    assert request is not None
    assert len(request.completion) == 16


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body"),
        (b"\xff", "body"),
        (b'{"prompt": [[1]]}', "body"),
        (b'{"prompt": "x", "stream": true}', "stream"),
        (b'{"prompt": "x", "n": 2}', "n: 2"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens: 0"),
        (b'{"prompt": "x", "max_tokens": 1000000000000}', "more than 160"),
        (b'{"prompt": "x", "cache_salt": ""}', "cache_salt"),
        (b'{"prompt": [1, -1]}', r"prompt\[1\]"),
        (b'{"prompt": [4294967296]}', r"prompt\[0\]"),
    ],
)
def test_what_cannot_be_answered_names_the_field(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        engine_request("a", parse_completion(body), SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SimulatorSettings(version="0.9"), "version"),
        (SimulatorSettings(block_size=0), "block_size"),
        (SimulatorSettings(blocks=1), "blocks"),
        (SimulatorSettings(blocks=2, max_model_len=17), "max_model_len"),
        (SimulatorSettings(decode_tokens_per_s=-1), "decode_tokens_per_s"),
        (SimulatorSettings(model="m", adapters={"m": "p"}), "adapters"),
        (SimulatorSettings(http_port=0), "http_port: 0"),
        (SimulatorSettings(replay_port=5558, data_parallel_size=2), "5558 is taken by events_port"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings: SimulatorSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check()
