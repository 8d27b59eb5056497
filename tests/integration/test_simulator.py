"""The simulated engine on real sockets, in front of our own decoder, mirror and index."""

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from index.hashing import pack_tokens
from index.lookup import Prompt
from ops.embedded.processes import ChildProcess, listens
from ops.replay.pipeline import InProcess
from ops.simulator.api import completion_of
from ops.simulator.block_pool import BlockPool
from ops.simulator.chain import Adapter, HashScheme, root_of
from ops.simulator.dialect import dialect_of
from ops.simulator.engine import Engine, Limits, Request
from ops.simulator.mooncake.server import run_master
from ops.simulator.mooncake.settings import MasterSettings
from ops.simulator.mooncake.wire import encode_question
from ops.simulator.publisher import END_SEQUENCE, Publisher
from ops.simulator.server import run_engine
from ops.simulator.settings import ServerSettings, SimulatorSettings
from ops.simulator.wire import encode_batch
from relays.decoders import decoder_of
from relays.dialects import EngineSettings, vllm_profile
from relays.mirror import Mirror
from schemas.errors import ConfigError
from schemas.profiles import Profile
from tests.support.waiting import until

DEADLINE_S = 20.0
FRENCH = Adapter("french", 1, "loras/french")


# ---- what subscribers learn


@pytest.mark.parametrize("version", ["0.14.1", "0.25.1", "0.32.0"])
async def test_a_mirror_of_the_events_equals_the_pool_after_every_step(version: str) -> None:
    """A few hundred random requests in a small pool, with salts, an adapter, aborts and resets."""
    chance = random.Random(version)
    settings = simulator(version=version, topic="kv@sim")
    dialect = dialect_of(version)
    pool = BlockPool(40, 4, unhashed_first=dialect.unhashed_first)
    engine = Engine(pool, HashScheme(root_of("0"), 4, dialect.tagged_keys), dialect, Limits(4, 48, 1000))
    profile = vllm_profile("m", "sim", version, EngineSettings(block_size=4, hash_seed="0"))
    mirror = Mirror(profile)
    conversations = Conversations(chance, block_size=4, longest=80)
    seen = 0
    async with subscriber(settings) as (publisher, messages):
        for number in range(300):
            prompt = conversations.next_prompt()
            salt = chance.choice([None, None, "a", "b"])
            adapter = chance.choice([None, None, FRENCH])
            engine.submit(Request(str(number), prompt, completion_of(prompt, chance.randrange(1, 12)), adapter, salt))
            if chance.random() < 0.05:
                engine.abort(str(number - 1))
            if chance.random() < 0.02:
                while engine.running or engine.waiting:
                    seen += await _step_and_compare(engine, publisher, messages, mirror, profile)
                assert engine.reset_prefix_cache()
            for _ in range(chance.randrange(1, 12)):
                seen += await _step_and_compare(engine, publisher, messages, mirror, profile)
    assert seen > 300
    assert not mirror.counts["removal_unknown"]
    assert not mirror.counts["parent_unknown"]


async def _step_and_compare(
    engine: Engine,
    publisher: Publisher,
    messages: Callable[[], Awaitable[list[bytes]]],
    mirror: Mirror,
    profile: Profile,
) -> int:
    events = engine.step().events if engine.running or engine.waiting else []
    if events:
        await publisher.publish(encode_batch(time.time(), events, 0, dialect_of(profile.version)))
        _, sequence, payload = await messages()
        decoded = decoder_of(profile)(int.from_bytes(sequence, "big"), payload)
        assert not decoded.rejects
        mirror.apply(decoded.events)
    if events or not engine.waiting:
        queued_clear = not engine.pool.table() and not events
        assert queued_clear or {name for _, name in mirror.engine_table("gpu")} == set(engine.pool.table())
    return len(events)


@pytest.mark.parametrize(
    ("version", "namespaces"), [("0.14.1", False), ("0.25.1", True), ("0.32.0", True)], ids=lambda value: str(value)
)
async def test_predictions_equal_what_the_engine_then_reuses(version: str, namespaces: bool) -> None:
    """One request at a time; up to 0.16 events do not tell salts, so none are used there."""
    chance = random.Random(version)
    settings = simulator(version=version, block_size=8, blocks=60, adapters={FRENCH.name: FRENCH.path}, hash_seed="7")
    profile = vllm_profile(settings.model, "sim", version, EngineSettings(block_size=8, hash_seed="7"))
    index = InProcess(profile)
    conversations = Conversations(chance, block_size=8, longest=300)
    hits = 0
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        sequence = 0
        for _ in range(200):
            tokens = conversations.next_prompt()
            salt = chance.choice([None, None, "a", "b"]) if namespaces else None
            adapter = chance.choice([None, None, FRENCH.name]) if namespaces else None
            prompt = Prompt(settings.model, len(tokens), pack_tokens(tokens), adapter=adapter, salt=salt)
            predicted = (await index.predict(prompt)).tokens
            answer = await complete(
                http,
                model=adapter or settings.model,
                prompt=tokens,
                max_tokens=chance.randrange(1, 30),
                cache_salt=salt,
                return_token_ids=True,
            )
            conversations.hear(tokens, answer["choices"][0]["token_ids"])
            assert predicted == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            hits += predicted > 0
            for message in await replay(sequence):
                sequence = int.from_bytes(message[-2], "big") + 1
                await index.take(sequence - 1, message[-1])
    assert hits > 40


async def test_a_clear_is_heard_with_the_next_request_only() -> None:
    settings = simulator()
    async with serving(settings) as http, replaying(settings.replay_port) as replay:
        await complete(http, prompt=list(range(40)))
        before = len(await replay(0))
        assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
        assert len(await replay(0)) == before
        answer = await complete(http, prompt=list(range(40)))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        batch = msgspec.msgpack.decode((await replay(before))[0][-1])
    assert [event["type"] for event in batch[1]] == ["AllBlocksCleared", "BlockStored"]


# ---- the sockets


@pytest.mark.parametrize(
    ("version", "parts", "end"),
    [("0.25.1", 3, [b"", END_SEQUENCE, b""]), ("0.26.0", 4, [b"", b"", END_SEQUENCE, b""])],
)
async def test_a_replay_is_framed_as_its_version_does(version: str, parts: int, end: list[bytes]) -> None:
    settings = simulator(version=version, topic="kv@sim")
    async with subscriber(settings) as (publisher, messages), replaying(settings.replay_port) as replay:
        await publisher.publish(b"one")
        live = await messages()
        (message,) = await replay(int.from_bytes(live[1], "big"))
        assert len(message) == parts
        assert message[-3:] == ([b"kv@sim", live[1], b"one"] if parts == 4 else [b"", live[1], b"one"])
        assert replay.end == end


async def test_a_replay_starts_late_where_the_ring_overflowed() -> None:
    settings = simulator(buffer_steps=8)
    async with published(settings) as publisher, replaying(settings.replay_port) as replay:
        for number in range(10):
            await publisher.publish(b"%d" % number)
        assert [int.from_bytes(message[-2], "big") for message in await replay(0)] == list(range(2, 10))
        assert [message[-1] for message in await replay(8)] == [b"8", b"9"]
        assert await replay(10) == []


async def test_a_replay_request_without_its_empty_part_is_not_answered() -> None:
    settings = simulator()
    async with published(settings), replaying(settings.replay_port) as replay:
        await replay.socket.send_multipart([bytes(8)])
        assert await replay(0) == []


async def test_each_rank_has_its_own_cache_and_sockets() -> None:
    settings = simulator(data_parallel_size=2, ranks=2)
    tokens = list(range(40))
    async with (
        serving(settings) as http,
        replaying(settings.replay_port) as first,
        replaying(settings.replay_port + 1) as second,
    ):
        for _ in range(2):
            await complete(http, prompt=tokens, max_tokens=1, rank=1)
        assert await first(0) == []
        (message,) = await second(0)
        assert msgspec.msgpack.decode(message[-1])[2] == 1
        in_turn = [await complete(http, prompt=tokens, max_tokens=1) for _ in range(2)]
        cached = {answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in in_turn}
        assert cached == {0, 32}
        refused = await http.post("/v1/completions", json={"prompt": tokens}, headers={"X-data-parallel-rank": "2"})
        assert refused.status_code == 400


# ---- the server


async def test_an_answer_has_openais_shape() -> None:
    settings = simulator(adapters={"french": "loras/french"})
    async with serving(settings) as http:
        answer = await complete(http, model="simulated", prompt="one two three", max_tokens=4, return_token_ids=True)
        assert answer["object"] == "text_completion"
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        choice = answer["choices"][0]
        assert choice["text"].split() == [f"t{token}" for token in choice["token_ids"]]
        assert choice["finish_reason"] == "length"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/version")).json() == {"version": settings.version}
        models = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in models] == [("simulated", None), ("french", "simulated")]
        unknown = await http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
        broken = await http.post("/v1/completions", content=b"{")
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, 400)


async def test_requests_at_once_share_steps() -> None:
    settings = simulator(decode_tokens_per_s=50.0)
    async with serving(settings) as http:
        started_s = time.monotonic()
        await asyncio.gather(*(complete(http, prompt=[n] * 20, max_tokens=11) for n in range(32)))
        took_s = time.monotonic() - started_s
    assert 0.2 <= took_s < 32 * 0.2


async def test_a_client_that_leaves_aborts_its_request() -> None:
    settings = simulator(decode_tokens_per_s=10.0)
    async with serving(settings) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 500}, timeout=0.3)

        async def is_free() -> bool:
            return bool((await http.post("/reset_prefix_cache")).json()["success"])

        await until(is_free)


async def test_a_cancelled_engine_stops_and_frees_its_ports() -> None:
    settings = simulator(decode_tokens_per_s=1.0)
    for _ in range(2):
        async with serving(settings) as http:
            asked = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 500}))

            async def is_busy() -> bool:
                return not (await http.post("/reset_prefix_cache")).json()["success"]

            await until(is_busy)
        with contextlib.suppress(httpx.TransportError):
            assert (await asked).status_code == 503


@pytest.mark.parametrize("setting", ["http_port", "events_port", "replay_port"])
async def test_a_port_that_is_taken_is_named(setting: str) -> None:
    settings = simulator()
    with socket.create_server((settings.host, getattr(settings, setting))), pytest.raises(ConfigError, match=setting):
        await run_engine(settings)


# ---- a store that engines share


async def test_an_engine_reuses_what_another_one_put_into_the_store(tmp_path: Path) -> None:
    """Whole blocks, below the prompt's last token, behind what its own device has; the counters tell where from."""
    store, answers = simulated_master()
    tokens = list(range(100))
    async with mastering(store, tmp_path / "log"), heard_from(store.events_port) as hear:
        async with serving(simulator(store=answers)) as first, serving(simulator(store=answers)) as second:
            assert cached(await complete(first, prompt=tokens, max_tokens=40)) == 0
            assert cached(await complete(second, prompt=tokens[:50], max_tokens=1)) == 48
            assert cached(await complete(second, prompt=tokens[:96], max_tokens=1)) == 80
            assert cached(await complete(second, prompt=tokens, max_tokens=1)) == 96
            assert cached(await complete(second, prompt=tokens, max_tokens=1, cache_salt="a")) == 0
            counters = (await second.get("/metrics")).text
        sequence, payload = await hear()
    assert sequence == 1
    assert len(msgspec.msgpack.decode(payload)[1]) == 6, "the prefill alone is saved"
    found = {line.split("{")[0]: int(line.split()[-1]) for line in counters.splitlines() if line[0] != "#"}
    assert found == {
        "vllm:prefix_cache_queries_total": 346,
        "vllm:prefix_cache_hits_total": 48 + 96,
        "vllm:external_prefix_cache_queries_total": 346 - 144,
        "vllm:external_prefix_cache_hits_total": 48 + 32,
    }


async def test_an_engine_goes_on_without_its_store(tmp_path: Path) -> None:
    """It waits a second for each answer that does not come, and then computes; a master that comes later is asked."""
    store, answers = simulated_master()
    async with serving(simulator(store=answers)) as http:
        assert cached(await complete(http, prompt=list(range(40)), max_tokens=1)) == 0
        async with mastering(store, tmp_path / "log"), serving(simulator(store=answers)) as other:
            assert cached(await complete(http, prompt=list(range(100, 140)), max_tokens=1)) == 0
            assert cached(await complete(other, prompt=list(range(100, 140)), max_tokens=1)) == 32


@pytest.mark.parametrize("setting", ["rpc_port", "events_port"])
async def test_a_masters_port_that_is_taken_is_named(setting: str) -> None:
    store, _ = simulated_master()
    with socket.create_server((store.host, getattr(store, setting))), pytest.raises(ConfigError, match=setting):
        await run_master(store)


async def test_a_master_refuses_what_is_no_question(tmp_path: Path) -> None:
    """With an empty answer, and goes on."""
    store, answers = simulated_master()
    context = zmq.asyncio.Context()
    try:
        async with mastering(store, tmp_path / "log"), asyncio.timeout(DEADLINE_S):
            client = context.socket(zmq.REQ)
            client.connect(answers)
            for body, answer in [(b"\xc1", b""), (encode_question("put", ["k"]), b"\1"), (b"", b"")]:
                await client.send(body)
                assert await client.recv() == answer
    finally:
        context.destroy(linger=0)


# ---- builders


class Conversations:
    """Prompts that share beginnings: new ones on a few system prompts, and turns that go on."""

    def __init__(self, chance: random.Random, *, block_size: int, longest: int) -> None:
        self._chance = chance
        self._longest = longest
        self._systems = [self._words(chance.randrange(block_size * 4)) for _ in range(3)]
        self._open: list[list[int]] = []

    def next_prompt(self) -> list[int]:
        """Return a prompt that ends anywhere, also at the end of a block."""
        history = self._chance.choice([*self._open, *self._systems])
        if self._open and self._chance.random() < 0.3:
            return list(history)[: self._longest] or [0]
        prompt = (history + self._words(self._chance.randrange(1, 40)))[: self._longest]
        self.hear(prompt, [])
        return prompt

    def hear(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Remember a turn."""
        self._open = [*self._open[-5:], [*prompt, *completion]]

    def _words(self, count: int) -> list[int]:
        return [self._chance.randrange(1000) for _ in range(count)]


class Replays:
    """A DEALER that asks for replays; the last end mark is kept."""

    def __init__(self, dealer: zmq.asyncio.Socket) -> None:
        self.socket = dealer
        self.end: list[bytes] = []

    async def __call__(self, start: int) -> list[list[bytes]]:
        await self.socket.send_multipart([b"", start.to_bytes(8, "big")])
        messages: list[list[bytes]] = []
        async with asyncio.timeout(DEADLINE_S):
            while True:
                parts = await self.socket.recv_multipart()
                if parts[-2] == END_SEQUENCE:
                    self.end = parts
                    return messages
                messages.append(parts)


def simulator(*, ranks: int = 1, **changes: Any) -> SimulatorSettings:
    """Return settings on ports that are free now."""
    ports = free_ports(1 + 2 * ranks)
    return SimulatorSettings(
        http_port=ports[0], events_port=ports[1], replay_port=ports[1 + ranks], **{"blocks": 200, **changes}
    )


def free_ports(count: int) -> range:
    """Return neighbouring ports, all of them free."""
    while True:
        with contextlib.ExitStack() as bound:
            first = bound.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    bound.enter_context(socket.create_server(("127.0.0.1", port)))
                return range(first, first + count)


@contextlib.asynccontextmanager
async def serving(settings: ServerSettings) -> AsyncIterator[httpx.AsyncClient]:
    """Run an engine, and stop it at the end."""
    engine = asyncio.create_task(run_engine(settings))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=DEADLINE_S) as http:

            async def is_healthy() -> bool:
                assert not engine.done(), engine.exception()
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get("/health")).status_code == 200
                return False

            await until(is_healthy)
            yield http
            engine.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await engine
    finally:
        engine.cancel()


async def complete(http: httpx.AsyncClient, *, rank: int | None = None, **body: Any) -> Any:
    """Return the answer to one completion."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    """Return how much of the prompt was reused."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def simulated_master() -> tuple[MasterSettings, str]:
    """Return settings on ports that are free now, and the address that engines ask at."""
    rpc, events = free_ports(2)
    return MasterSettings(rpc_port=rpc, events_port=events), f"tcp://127.0.0.1:{rpc}"


@contextlib.asynccontextmanager
async def mastering(settings: MasterSettings, log: Path) -> AsyncIterator[None]:
    """Run a simulated Mooncake master in a process of its own, for engines wait for it; stop it at the end."""
    values = msgspec.to_builtins(settings)
    arguments = [f"{name}={values[name]}" for name in ("rpc_port", "events_port")]
    options = [part for argument in arguments for part in ("--set", argument)]
    master = ChildProcess([sys.executable, "-m", "ops.cli", "engine", "--kind", "mooncake", *options], log)

    async def answers() -> bool:
        return listens(settings.rpc_port) and listens(settings.events_port)

    failure = await master.ready(answers, DEADLINE_S)
    assert failure is None, f"{failure}; its log: {log}"
    try:
        yield
        assert master.exit_code is None, log
    finally:
        await master.stop(DEADLINE_S)
    assert master.exit_code == 0, log


@contextlib.asynccontextmanager
async def heard_from(port: int) -> AsyncIterator[Callable[[], Awaitable[tuple[int, bytes]]]]:
    """Yield how to receive a publisher's next message, from when the subscription has arrived."""
    context = zmq.asyncio.Context()
    try:
        messages = context.socket(zmq.SUB)
        monitor = messages.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        messages.subscribe(b"")
        messages.connect(f"tcp://127.0.0.1:{port}")

        async def receive() -> tuple[int, bytes]:
            async with asyncio.timeout(DEADLINE_S):
                _, sequence, payload = await messages.recv_multipart()
                return int.from_bytes(sequence, "big"), payload

        async with asyncio.timeout(DEADLINE_S):
            await monitor.recv_multipart()
        await asyncio.sleep(0.1)  # the subscription follows the handshake, unseen
        yield receive
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def published(settings: SimulatorSettings) -> AsyncIterator[Publisher]:
    """Yield a publisher that answers replays."""
    publisher = Publisher(settings, 0, dialect_of(settings.version))
    replays = asyncio.create_task(publisher.serve_replays())
    try:
        yield publisher
    finally:
        replays.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await replays
        publisher.close()


@contextlib.asynccontextmanager
async def subscriber(
    settings: SimulatorSettings,
) -> AsyncIterator[tuple[Publisher, Callable[[], Awaitable[list[bytes]]]]]:
    """Yield a publisher, and how to receive what it publishes next."""
    context = zmq.asyncio.Context()
    try:
        async with published(settings) as publisher:
            messages = context.socket(zmq.SUB)
            messages.subscribe(settings.topic)
            messages.connect(f"tcp://127.0.0.1:{settings.events_port}")
            sent = 0
            while not await messages.poll(10):  # until the subscription has arrived
                await publisher.publish(b"probe")
                sent += 1
            while int.from_bytes((await messages.recv_multipart())[1], "big") < sent - 1:
                pass

            async def receive() -> list[bytes]:
                async with asyncio.timeout(DEADLINE_S):
                    parts: list[bytes] = await messages.recv_multipart()
                    return parts

            yield publisher, receive
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def replaying(port: int) -> AsyncIterator[Replays]:
    """Yield a socket that asks for replays."""
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield Replays(dealer)
    finally:
        context.destroy(linger=0)
