"""The simulated SGLang, as a server sees it."""

from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from ops.simulator.api import model_cards
from ops.simulator.kind import Asked
from ops.simulator.rank import Rank
from ops.simulator.settings import ServerSettings
from ops.simulator.sglang.api import SglangCompletion, answer_of, engine_request, parse_completion, wanted_rank
from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.dialect import dialect_of
from ops.simulator.sglang.engine import Engine
from ops.simulator.sglang.requests import Limits
from ops.simulator.sglang.settings import SglangSettings
from ops.simulator.sglang.wire import encode_batch


class SglangKind:
    """Builds SGLang's ranks, and reads and writes its HTTP."""

    reset_path: ClassVar[str] = "/flush_cache"
    reset_methods: ClassVar[tuple[str, ...]] = ("GET", "POST")
    info_paths: ClassVar[tuple[str, ...]] = ("/server_info", "/get_server_info")  # the second is the older name

    def __init__(self, settings: ServerSettings) -> None:
        assert isinstance(settings, SglangSettings)
        self._settings = settings
        self._dialect = dialect_of(settings.version, settings.event_format)

    @property
    def version(self) -> str:
        """Return SGLang's version."""
        return self._settings.version

    def rank(self, number: int) -> Rank:
        """Return one rank, its ports bound."""
        settings, dialect = self._settings, self._dialect
        cache = Cache(
            dialect,
            settings.page_size,
            settings.pages,
            host_pages=settings.host_pages,
            write_policy=settings.write_policy,
        )
        limits = Limits(settings.max_running_requests, settings.chunked_prefill_size, settings.longest)
        engine = Engine(cache, limits, pairs=settings.eagle)
        return Rank(settings, number, engine, partial(encode_batch, dialect=dialect), dialect)

    def read(self, body: bytes, request_id: str, rank_header: str | None) -> Asked:
        """Return what is asked for."""
        completion = parse_completion(body)
        request = engine_request(request_id, completion, self._settings, self._dialect)
        rank = wanted_rank(completion, rank_header)
        return Asked(completion, completion.model or self._settings.model, request, rank)

    def answer(self, asked: Asked, finished: Any, created_s: int) -> msgspec.Struct:
        """Return a finished request's answer."""
        assert isinstance(asked.completion, SglangCompletion)
        return answer_of(finished, asked.completion, asked.model, created_s)

    def answer_reset(self, *, done: bool) -> Response:
        """Return the answer to a flush of the cache."""
        return Response("Cache flushed.\n" if done else "Flush cache failed.\n", 200 if done else 400)

    def models(self, created_s: int) -> list[Any]:
        """Return the model and its adapters."""
        return list(model_cards(self._settings, created_s, self._settings.longest, "sglang"))

    def info(self) -> dict[str, Any]:
        """Return some of the arguments that the server was started with, and its version."""
        settings = self._settings
        return {
            "model_path": settings.model,
            "page_size": settings.page_size,
            "dp_size": settings.data_parallel_size,
            "enable_hierarchical_cache": bool(settings.host_pages),
            "hicache_write_policy": settings.write_policy,
            "chunked_prefill_size": settings.chunked_prefill_size,
            "max_running_requests": settings.max_running_requests,
            "version": self.version,
        }

    def metrics(self) -> None:
        """Return None: SGLang's counters are not simulated."""

    def close(self) -> None:
        """Do nothing: the ranks share nothing."""
