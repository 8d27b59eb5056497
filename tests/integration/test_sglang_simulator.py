"""The simulated SGLang on real sockets, in front of our own decoder, mirror and index, and of a real relay."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from index.digests import index_digest
from index.hashing import pack_tokens
from index.lookup import Prompt
from ops.check.live import Target, check_live
from ops.check.report import is_fit
from ops.kafka_client import client_options
from ops.replay.pipeline import InProcess
from ops.simulator.publisher import END_SEQUENCE
from ops.simulator.sglang.settings import SglangSettings
from relays.dialects import EngineSettings, sglang_profile
from relays.process import Relay, RelayConfig
from schemas.profiles import Rank
from schemas.topics import topic_specs
from streams.topics import create_topics
from tests.integration.test_simulator import Conversations, Replays, complete, free_ports, replaying, serving
from tests.support.bench import DEADLINE_S, FAST
from tests.support.topic_index import TopicIndex
from tests.support.waiting import until

SIZE = 16
CASES: list[tuple[str, dict[str, Any]]] = [
    ("0.5.10.post1", {}),
    ("0.5.18", {}),
    ("0.5.23", {}),
    ("0.5.10.post1", {"pages": 26, "host_pages": 60}),
    ("0.5.15", {"pages": 26, "host_pages": 60}),
    ("0.5.18", {"pages": 26, "host_pages": 60, "write_policy": "write_back"}),
    ("0.5.23", {"pages": 26, "host_pages": 60}),
    ("0.5.23", {"pages": 26, "host_pages": 60, "write_policy": "write_through_selective"}),
    ("0.5.23", {"pages": 26, "host_pages": 60, "write_policy": "write_back"}),
    ("0.5.23", {"page_size": 1, "pages": 700}),
]


def simulator(*, ranks: int = 1, **changes: Any) -> SglangSettings:
    """Return settings on ports that are free now."""
    ports = free_ports(1 + 2 * ranks)
    return SglangSettings(
        http_port=ports[0], events_port=ports[1], replay_port=ports[1 + ranks], **{"pages": 200, **changes}
    )


def index_of(settings: SglangSettings) -> InProcess:
    """Return an index of an engine with these settings."""
    facts = EngineSettings(
        block_size=settings.page_size,
        hicache=bool(settings.host_pages),
        drafting="eagle" if settings.eagle else "none",
    )
    return InProcess(sglang_profile(settings.model, "sim", settings.version, facts))


def cached_of(answer: Any) -> tuple[int, int]:
    """Return what an answer says was cached, and how much of it on the host."""
    details = (answer.get("sglext") or {}).get("cached_tokens_details") or {"device": 0, "host": 0}
    total = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert details["device"] + details["host"] == total
    return total, details["host"]


async def heard(replay: Replays, index: InProcess, sequence: int) -> int:
    """Bring what was published since then into an index; return the next sequence."""
    for message in await replay(sequence):
        number = int.from_bytes(message[-2], "big")
        assert number == sequence
        await index.take(number, message[-1])
        sequence += 1
    return sequence


@pytest.mark.parametrize(("version", "changes"), CASES, ids=lambda value: str(value))
async def test_predictions_equal_what_the_engine_then_reuses(version: str, changes: dict[str, Any]) -> None:
    """Token for token and tier by tier, one request at a time, in a pool that evicts and a host that does too."""
    chance = random.Random(f"{version} {changes}")
    settings = simulator(version=version, adapters={"sql": "loras/sql"}, **{"pages": 40, "page_size": SIZE, **changes})
    index = index_of(settings)
    conversations = Conversations(chance, block_size=SIZE, longest=300)
    told = {part for part in ("salt", "adapter") if part not in index.engine.mirror.profile.hidden_namespaces}
    hits = host_hits = 0
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        sequence = 0
        for _ in range(150):
            tokens = conversations.next_prompt()
            salt = chance.choice([None, None, "a"]) if "salt" in told else None
            adapter = chance.choice([None, None, None, "sql"]) if "adapter" in told else None
            await settled(replay, sequence)
            sequence = await heard(replay, index, sequence)
            prompt = Prompt(settings.model, len(tokens), pack_tokens(tokens), adapter=adapter, salt=salt)
            predicted = await index.predict(prompt)
            answer = await complete(
                http,
                prompt=tokens,
                max_tokens=chance.randrange(1, 30),
                cache_salt=salt,
                lora_path=adapter,
                return_token_ids=True,
                return_cached_tokens_details=True,
            )
            conversations.hear(tokens, answer["choices"][0]["token_ids"])
            cached, on_host = cached_of(answer)
            assert predicted.tokens == cached
            # a demotion that is not told leaves it open which tier a page is in
            assert predicted.by_tier.get("host", 0) == on_host or "tier_uncertain" in predicted.marks
            hits += cached > 0
            host_hits += on_host > 0
    assert hits > 40
    assert host_hits > 5 or not settings.host_pages


async def settled(replay: Replays, sequence: int) -> None:
    """Wait until the engine has told the copies of its last request: an idle step tells them, a moment later."""
    seen = -1

    async def is_quiet() -> bool:
        nonlocal seen
        before, seen = seen, len(await replay(sequence))
        return before == seen

    await until(is_quiet)


async def test_a_prompt_of_pairs_leaves_out_its_last_token() -> None:
    """With EAGLE a prompt of 17 tokens that is cached whole reuses nothing: 16 tokens are 15 pairs, no page."""
    settings = simulator(eagle=True, page_size=SIZE)
    index = index_of(settings)
    tokens = list(range(SIZE + 1))
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        await complete(http, prompt=[*tokens, 1, 2], max_tokens=1)
        await heard(replay, index, 0)
        answer = await complete(http, prompt=tokens, max_tokens=1)
        assert cached_of(answer)[0] == 0
        assert (await index.predict(Prompt(settings.model, len(tokens), pack_tokens(tokens)))).tokens == 0


async def test_a_short_host_run_is_computed_again() -> None:
    """A run of fewer than ten tokens on the host is not loaded back, so it is not reused."""
    settings = simulator(page_size=4, pages=16, host_pages=100)
    index = index_of(settings)
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        await complete(http, prompt=list(range(8)), max_tokens=1)
        await complete(http, prompt=list(range(100, 158)), max_tokens=1)
        await settled(replay, 0)
        await heard(replay, index, 0)
        tokens = list(range(9))
        predicted = await index.predict(Prompt(settings.model, len(tokens), pack_tokens(tokens)))
        answer = await complete(http, prompt=tokens, max_tokens=1)
        assert cached_of(answer)[0] == 0
        assert predicted.tokens == 0


async def test_pairs_are_predicted_where_the_last_page_is_not_whole() -> None:
    """With EAGLE, prompts whose pairs do not end at a page are predicted to the token."""
    chance = random.Random(3)
    settings = simulator(eagle=True, page_size=SIZE, pages=40)
    index = index_of(settings)
    conversations = Conversations(chance, block_size=SIZE, longest=300)
    hits = 0
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        sequence = 0
        for _ in range(80):
            tokens = conversations.next_prompt()
            if len(tokens) % SIZE == 1:
                tokens = [*tokens, 1]
            predicted = (await index.predict(Prompt(settings.model, len(tokens), pack_tokens(tokens)))).tokens
            answer = await complete(http, prompt=tokens, max_tokens=chance.randrange(1, 30), return_token_ids=True)
            conversations.hear(tokens, answer["choices"][0]["token_ids"])
            assert predicted == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            hits += predicted > 0
            sequence = await heard(replay, index, sequence)
    assert hits > 20


async def test_a_flush_is_heard_at_once() -> None:
    """Unlike vLLM's, SGLang's idle loop publishes, so nobody has to ask for anything."""
    settings = simulator()
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        await complete(http, prompt=list(range(40)), max_tokens=1)
        before = len(await replay(0))
        assert (await http.get("/flush_cache")).status_code == 200

        async def told() -> bool:
            return len(await replay(0)) > before

        await until(told)
        batch = msgspec.msgpack.decode((await replay(before))[0][-1])
        assert [event["type"] for event in batch[1]] == ["AllBlocksCleared"]
        assert cached_of(await complete(http, prompt=list(range(40)), max_tokens=1)) == (0, 0)


async def test_a_flush_is_refused_while_a_request_runs() -> None:
    """With 400 and words, as SGLang answers."""
    settings = simulator(decode_tokens_per_s=5.0)
    async with serving(settings) as http:
        asked = asyncio.ensure_future(complete(http, prompt="x", max_tokens=4))

        async def is_refused() -> bool:
            return (await http.post("/flush_cache")).status_code == 400

        await until(is_refused)
        await asked


@pytest.mark.parametrize(
    ("version", "parts", "end"),
    [("0.5.21", 3, [b"", END_SEQUENCE, b""]), ("0.5.22", 4, [b"", b"", END_SEQUENCE, b""])],
)
async def test_a_replay_is_framed_as_its_version_does(version: str, parts: int, end: list[bytes]) -> None:
    """The first batch is the clear of an empty cache, published before any request."""
    settings = simulator(version=version, topic="kv@sim")
    async with serving(settings), replaying(settings.replay_port) as replay:
        (message,) = await replay(0)
        assert len(message) == parts
        assert message[1:-2] == ([b"kv@sim"] if parts == 4 else [])
        assert msgspec.msgpack.decode(message[-1])[1] == [{"type": "AllBlocksCleared"}]
        assert replay.end == end


async def test_each_rank_has_its_own_cache_and_sockets() -> None:
    """The header, or the body, chooses; batches carry the rank."""
    settings = simulator(data_parallel_size=2, ranks=2)
    tokens = list(range(40))
    async with serving(settings) as http, replaying(settings.replay_port + 1) as second:
        await complete(http, prompt=tokens, max_tokens=1, rank=1)
        by_body = await complete(http, prompt=tokens, max_tokens=1, routed_dp_rank=1)
        assert by_body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert {msgspec.msgpack.decode(message[-1])[2] for message in await second(0)} == {1}
        refused = await http.post("/v1/completions", json={"prompt": tokens, "routed_dp_rank": 2})
        assert refused.status_code == 400


async def test_an_answer_has_sglangs_shape() -> None:
    """What was cached is told by tier where it is asked for."""
    settings = simulator(adapters={"sql": "loras/sql"})
    async with serving(settings) as http:
        for _ in range(2):
            answer = await complete(http, prompt=list(range(40)), max_tokens=4, return_cached_tokens_details=True)
        assert answer["sglext"] == {"cached_tokens_details": {"device": 32, "host": 0}}
        assert set(answer["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
        models = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["owned_by"]) for card in models] == [("simulated", "sglang"), ("sql", "sglang")]
        for path in ("/server_info", "/get_server_info"):
            info = (await http.get(path)).json()
            assert (info["version"], info["page_size"], info["enable_hierarchical_cache"]) == ("0.5.23", SIZE, False)
        assert (await http.get("/metrics")).status_code == 404
        unknown = await http.post("/v1/completions", json={"prompt": "x", "model": "simulated:french"})
        assert unknown.status_code == 404


@pytest.mark.parametrize("version", ["0.5.10", "0.5.18", "0.5.23"])
async def test_the_conformance_check_finds_it_fit(version: str) -> None:
    """Its version too, which its API tells; another version is not what its events look like."""
    settings = simulator(version=version)
    async with serving(settings):
        target = Target(
            engine="sglang",
            version=version,
            events=f"tcp://127.0.0.1:{settings.events_port}",
            replay=f"tcp://127.0.0.1:{settings.replay_port}",
            topic="",
            rank=0,
            api=f"http://127.0.0.1:{settings.http_port}",
            settings=EngineSettings(block_size=SIZE),
        )
        findings, _ = await check_live(target, 1.0)
        assert is_fit(findings), findings
        verdicts = {finding.rule: finding.verdict for finding in findings}
        assert (verdicts["version"], verdicts["predictions"]) == ("fit", "fit")
        other = "0.5.23" if version != "0.5.23" else "0.5.18"
        findings, _ = await check_live(msgspec.structs.replace(target, version=other), 1.0)
        assert not is_fit(findings)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
async def test_a_relay_follows_a_simulated_engine(kafka: str, unique_name: str, version: str) -> None:
    """What the topic amounts to is what the engine's own messages do: HiCache, evictions and a flush included."""
    settings = simulator(version=version, pages=40, host_pages=60)
    facts = EngineSettings(block_size=settings.page_size, hicache=True)
    ports = (settings.events_port, settings.replay_port)
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    config = RelayConfig(
        model=unique_name, replica="r", engine="sglang", version=version, ranks=(Rank(0, *endpoints),), settings=facts
    )
    chance = random.Random(version)
    conversations = Conversations(chance, block_size=SIZE, longest=400)
    await create_topics(kafka, topic_specs([unique_name], 2))
    async with (
        TopicIndex(kafka, unique_name, 2) as index,
        serving(settings) as http,
        replaying(settings.replay_port) as replay,
    ):
        relay = asyncio.create_task(Relay(config, FAST, client_options(kafka)).run())
        try:
            for number in range(60):
                tokens = conversations.next_prompt()
                answer = await complete(http, prompt=tokens, max_tokens=chance.randrange(1, 30), return_token_ids=True)
                conversations.hear(tokens, answer["choices"][0]["token_ids"])
                if number == 30:
                    assert (await http.post("/flush_cache")).status_code == 200
            await settled(replay, 0)
            truth = InProcess(sglang_profile(unique_name, "r", version, facts))
            last = await heard(replay, truth, 0) - 1
            wanted = index_digest(truth.engine.mirror.resident())

            async def is_equal() -> bool:
                row = await index.row("r", 0)
                return row is not None and row.applied.get("0") == last and await index.digest("r", 0) == wanted

            await until(is_equal, DEADLINE_S)
        finally:
            relay.cancel()
            with suppress(asyncio.CancelledError):
                await relay
