"""The simulated vLLM, as a server sees it."""

import os
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from ops.simulator.api import answer_of, engine_request, model_cards, parse_completion
from ops.simulator.block_pool import BlockPool
from ops.simulator.chain import DEFAULT_SEED, HashScheme, root_of
from ops.simulator.connector import Connector
from ops.simulator.dialect import dialect_of
from ops.simulator.engine import Engine, Limits
from ops.simulator.kind import Asked
from ops.simulator.mooncake.client import StoreClient
from ops.simulator.rank import Rank
from ops.simulator.settings import ServerSettings, SimulatorSettings
from ops.simulator.wire import encode_batch

_COUNTERS = {
    "vllm:prefix_cache_queries_total": "queried",
    "vllm:prefix_cache_hits_total": "found",
    "vllm:external_prefix_cache_queries_total": "queried_outside",
    "vllm:external_prefix_cache_hits_total": "found_outside",
}


class VllmKind:
    """Builds vLLM's ranks, and reads and writes its HTTP."""

    reset_path: ClassVar[str] = "/reset_prefix_cache"
    reset_methods: ClassVar[tuple[str, ...]] = ("POST",)
    info_paths: ClassVar[tuple[str, ...]] = ("/version",)

    def __init__(self, settings: ServerSettings) -> None:
        assert isinstance(settings, SimulatorSettings)
        self._settings = settings
        self._dialect = dialect_of(settings.version)
        self._root = self._first_hash()
        self._store = StoreClient(settings.store, settings.model) if settings.store else None
        self._engines: dict[int, Engine] = {}  # by rank

    @property
    def version(self) -> str:
        """Return vLLM's version."""
        return self._settings.version

    def rank(self, number: int) -> Rank:
        """Return one rank, its ports bound."""
        settings, dialect = self._settings, self._dialect
        engine = Engine(
            BlockPool(settings.blocks, settings.block_size, unhashed_first=dialect.unhashed_first),
            HashScheme(self._root, settings.block_size, dialect.tagged_keys),
            dialect,
            Limits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.model_len),
            Connector(self._store, settings.block_size) if self._store is not None else None,
        )
        self._engines[number] = engine
        return Rank(settings, number, engine, partial(encode_batch, dialect=dialect), dialect)

    def read(self, body: bytes, request_id: str, rank_header: str | None) -> Asked:
        """Return what is asked for; vLLM too ignores a rank that is no number."""
        completion = parse_completion(body)
        rank: int | None
        try:
            rank = int(rank_header or "")
        except ValueError:
            rank = None
        request = engine_request(request_id, completion, self._settings)
        return Asked(completion, completion.model or self._settings.model, request, rank)

    def answer(self, asked: Asked, finished: Any, created_s: int) -> msgspec.Struct:
        """Return a finished request's answer."""
        return answer_of(finished, asked.completion, asked.model, created_s)

    def answer_reset(self, *, done: bool) -> Response:
        """Return the answer to a reset of the cache."""
        return Response(msgspec.json.encode({"success": done}), media_type="application/json")

    def models(self, created_s: int) -> list[Any]:
        """Return the model and its adapters."""
        return list(model_cards(self._settings, created_s, self._settings.model_len))

    def info(self) -> dict[str, Any]:
        """Return vLLM's version."""
        return {"version": self.version}

    def metrics(self) -> str:
        """Return the counters of prefix hits (v1/metrics/loggers.py); none is labelled but by model and rank."""
        lines: list[str] = []
        for name, field in _COUNTERS.items():
            lines.append(f"# TYPE {name} counter")
            for number, engine in self._engines.items():
                labels = f'engine="{number}",model_name={msgspec.json.encode(self._settings.model).decode()}'
                lines.append(f"{name}{{{labels}}} {getattr(engine.hits, field)}")
        return "\n".join([*lines, ""])

    def close(self) -> None:
        """Close the way to the store."""
        if self._store is not None:
            self._store.close()

    def _first_hash(self) -> bytes:
        """Return what all hashes start from; unset and before 0.30 that is random for each start, for all ranks."""
        if self._settings.hash_seed is not None:
            return root_of(self._settings.hash_seed)
        return root_of(DEFAULT_SEED) if self._dialect.fixed_seed else os.urandom(32)
