"""An engine's way to a simulated Mooncake master: it asks and waits, as vLLM's scheduler does (LookupKeyClient)."""

from collections.abc import Sequence

import structlog
import zmq

from ops.simulator.mooncake.wire import Verb, encode_question, object_key

_TIMEOUT_MS = 1000

log = structlog.get_logger()


class StoreClient:
    """A connector's Store; while the master does not answer nothing is found and nothing kept."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._endpoint = endpoint
        self._model = model
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.rcvtimeo = self._socket.sndtimeo = _TIMEOUT_MS
        # after a question without an answer the next one may be asked, and gets its own answer
        self._socket.req_relaxed = self._socket.req_correlate = True
        self._socket.connect(endpoint)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks are there, from the first on up to the first that is not."""
        answer = self._ask("exist", hashes)
        missing = answer.find(0)
        return len(answer) if missing < 0 else missing

    def save(self, hashes: Sequence[bytes]) -> None:
        """Give blocks to the store, which keeps those that it lacks, as far as there is room."""
        self._ask("put", hashes)

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)

    def _ask(self, verb: Verb, hashes: Sequence[bytes]) -> bytes:
        """Return a byte for each block, or nothing where no answer comes in time."""
        try:
            self._socket.send(encode_question(verb, [object_key(self._model, block_hash) for block_hash in hashes]))
            return self._socket.recv()
        except zmq.Again:
            log.warning("simulator.store_silent", endpoint=self._endpoint, waited_ms=_TIMEOUT_MS)
            return b""
