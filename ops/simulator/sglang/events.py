"""What a tree tells of its nodes, gathered as each version gathers it; pure.

Source: mem_cache/events.py of the 0.5.15, 0.5.18 and 0.5.23 wheels, radix_cache.py of 0.5.10.post1.
"""

from collections.abc import Sequence

from ops.simulator.sglang.dialect import Dialect
from ops.simulator.sglang.pages import Hasher, Namespace, Page, tokens_of
from schemas.sglang import AllBlocksCleared, BlockRemoved, BlockStored, Event

GPU = "GPU"
HOST = "CPU_PINNED"


class Recorder:
    """Events since the last step's end."""

    def __init__(self, dialect: Dialect, page_size: int) -> None:
        self.hasher = Hasher(dialect)
        self._dialect = dialect
        self._page_size = page_size
        self._events: list[Event] = []
        self._removed_key: str | None = None  # the extra key of the last removal

    @property
    def pending(self) -> bool:
        """Return whether there is anything to publish."""
        return bool(self._events)

    def take(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cleared(self) -> None:
        """Tell that everything is gone."""
        self._events.append(AllBlocksCleared())

    def stored(
        self, namespace: Namespace, before: bytes | None, pages: Sequence[Page], digests: Sequence[bytes], medium: str
    ) -> None:
        """Tell that a tier has pages now that follow the page of digest `before`."""
        names = [self.hasher.announced(namespace, digest) for digest in digests]
        parent = None if before is None else self.hasher.announced(namespace, before)
        salt = namespace.salt if self._dialect.salts else None
        adapter = namespace.adapter if self._dialect.adapters else None
        step = len(pages) if self._dialect.joined_stores else 1
        for at in range(0, len(pages), step):
            event = BlockStored(
                block_hashes=names[at : at + step],
                parent_block_hash=names[at - 1] if at else parent,
                token_ids=tokens_of(pages[at : at + step]),
                block_size=self._page_size,
                medium=medium,
                cache_salt=salt,
                lora_name=adapter,
            )
            if not self._continues(event):
                self._events.append(event)

    def removed(self, namespace: Namespace, digests: Sequence[bytes], medium: str) -> None:
        """Tell that a tier lost pages."""
        names = [self.hasher.announced(namespace, digest) for digest in digests]
        rule = self._dialect.removals
        last = self._events[-1] if self._events else None
        joins = rule == "row" or (rule == "row_of_key" and namespace.extra_key == self._removed_key)
        if rule == "page":
            self._events += [BlockRemoved(block_hashes=[name], medium=medium) for name in names]
        elif joins and isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes += names
        else:
            self._events.append(BlockRemoved(block_hashes=names, medium=medium))
        self._removed_key = namespace.extra_key

    def _continues(self, event: BlockStored) -> bool:
        """Return whether the event became a part of the one before, whose pages it follows in the same tier."""
        last = self._events[-1] if self._events else None
        if not self._dialect.joined_stores or not isinstance(last, BlockStored):
            return False
        same = (last.medium, last.cache_salt, last.lora_name) == (event.medium, event.cache_salt, event.lora_name)
        if not same or event.parent_block_hash != last.block_hashes[-1]:
            return False
        last.block_hashes += event.block_hashes
        last.token_ids += event.token_ids
        return True
