"""Real engines as a driver sees them: completions over HTTP, and the newest sequence that each has published."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from relays.sockets import END_MARK, unframe_replay


class LiveEngine(msgspec.Struct):
    """One entry of the list that the engines' starter writes."""

    replica: str
    version: str
    model: str
    url: str
    events: str
    replay: str
    topic: str
    block_size: int
    pid: int
    vocab_size: int = 2000
    max_model_len: int = 4096


class Completion(msgspec.Struct):
    """What an engine answered."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int


def load_engines(path: Path) -> list[LiveEngine]:
    """Return the engines of a list."""
    return msgspec.json.decode(path.read_bytes(), type=list[LiveEngine])


async def complete(
    http: httpx.AsyncClient, engine: LiveEngine, prompt: list[int], max_tokens: int, salt: str | None
) -> Completion:
    """Send a prompt; return the generated tokens and what was reused."""
    body: dict[str, Any] = {
        "model": engine.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    response = await http.post(f"{engine.url}/v1/completions", json=body, timeout=120.0)
    response.raise_for_status()
    answer = response.json()
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Completion(answer["choices"][0]["token_ids"], usage["prompt_tokens"], cached)


async def newest_sequence(context: zmq.asyncio.Context, engine: LiveEngine, start: int) -> int | None:
    """Return the newest sequence in the engine's ring, as its own replay socket tells it; None: none yet."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvhwm = 0
    try:
        socket.connect(engine.replay)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        newest = None
        while True:
            sequence, _ = unframe_replay(await socket.recv_multipart())
            if sequence == END_MARK:
                return newest
            newest = sequence
    finally:
        socket.close(0)
