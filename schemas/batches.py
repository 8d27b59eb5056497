"""The envelope that vLLM, SGLang, TensorRT-LLM (ZMQ) and Dynamo's consolidator put around their events."""

import msgspec


class Batch(msgspec.Struct, array_like=True):
    """One engine step's events, positional in every known release of vLLM, SGLang and TensorRT-LLM."""

    ts: float  # epoch seconds
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct):
    """The batch as a map; announced by vLLM for later releases."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None
