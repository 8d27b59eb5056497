"""vLLM's MooncakeStoreConnector: what a request loads from a store that engines share, and what it saves there; pure.

A prompt is looked up from its start, whatever the device has of it, and where the whole of it is there, again below its
last token. Every computed block of a prefill is offered to the store, which keeps what it lacks.

Source: vLLM distributed/kv_transfer/kv_connector/v1/mooncake/store/scheduler.py (get_num_new_matched_tokens,
build_connector_meta), store/data.py (ReqMeta) and store/worker.py (lookup, KVCacheStoreSendingThread).
"""

from collections.abc import Sequence
from typing import Protocol

from ops.simulator.chain import Chain


class Store(Protocol):
    """What keeps blocks by their hashes, for all engines that make the same hashes."""

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many of these are there, from the first on up to the first that is not."""

    def save(self, hashes: Sequence[bytes]) -> None:
        """Keep these blocks, as far as there is room."""


class Connector:
    """One engine's side of a store."""

    def __init__(self, store: Store, block_size: int) -> None:
        self._store = store
        self._block_size = block_size

    def loadable_tokens(self, chain: Chain, computed: int) -> int:
        """Return how many tokens of a prompt the store has beyond those that the device has."""
        below_last = chain.hashes[: (len(chain.tokens) - 1) // self._block_size]
        found = self._store.lookup(below_last) if below_last else 0
        return max(0, found * self._block_size - computed)

    def save(self, hashes: Sequence[bytes]) -> None:
        """Offer the computed blocks of a prefill, from its first one on."""
        self._store.save(hashes)
