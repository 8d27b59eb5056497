"""`python -m ops.bench.relay`: what one rank's relay does with a vLLM's messages, from bytes to records, and keeps."""

import argparse
import random
import time
import tracemalloc
from collections.abc import Iterator

import msgspec

from ops.bench.report import say
from relays.dialects import EngineSettings, profile_for
from relays.engine import EngineRank
from schemas.events import encode_record
from schemas.profiles import Holder

_UNIT = 16  # tokens
_SHORTEST, _LONGEST = 4, 64  # blocks of a prompt


def payloads(blocks: int, held: int) -> Iterator[bytes]:
    """Yield messages that store prompts of `blocks` blocks in all, and drop the oldest where more than `held` are."""
    rng = random.Random(1)
    stored: list[list[int]] = []
    count = name = 0
    while name < blocks:
        names = list(range(name, name + rng.randint(_SHORTEST, _LONGEST)))
        name += len(names)
        tokens = [rng.randrange(128_000) for _ in range(len(names) * _UNIT)]
        fields = {"block_hashes": names, "parent_block_hash": None, "token_ids": tokens, "block_size": _UNIT}
        events: list[dict[str, object]] = [{"type": "BlockStored", "lora_id": None, "medium": "GPU", **fields}]
        stored.append(names)
        count += len(names)
        while count > held:
            gone = stored.pop(0)
            count -= len(gone)
            events.append({"type": "BlockRemoved", "block_hashes": gone[::-1], "medium": "GPU"})
        yield msgspec.msgpack.encode([0.0, events, 0])


def feed(messages: list[bytes]) -> EngineRank:
    """Return a rank that has taken all messages, and told each."""
    profile = profile_for("vllm", "bench/model", "r", "0.32.0", EngineSettings(block_size=_UNIT))
    rank = EngineRank(profile, Holder("r", 0), life=1)
    for sequence, payload in enumerate(messages):
        rank.take(sequence, payload)
        for record in rank.speak():
            encode_record(record)
    return rank


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.relay", description=__doc__)
    parser.add_argument("--blocks", type=int, default=200_000, help="that are stored")
    parser.add_argument("--held", type=int, default=50_000, help="of them at most at a time")
    arguments = parser.parse_args()
    messages = list(payloads(arguments.blocks, arguments.held))
    began_s = time.process_time()
    feed(messages)
    took_s = time.process_time() - began_s
    tracemalloc.start()
    rank = feed(messages)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    held = rank.mirror.blocks
    say(f"{took_s / arguments.blocks * 1e6:.1f} us of CPU for a block that is stored and later removed")
    say(f"{kept_bytes / held:.0f} bytes for each of {held:,} cached blocks")


if __name__ == "__main__":
    main()
