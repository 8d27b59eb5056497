"""vLLM's pool of KV blocks: reference counts, a free queue in LRU order, copies by hash, and its events; pure.

Source: v1/core/block_pool.py, 0.12 to 0.32.
"""

from collections import OrderedDict
from collections.abc import Sequence

from ops.simulator.chain import Chain, announced
from schemas.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Event

_MEDIUM = "GPU"
_GROUP = 0
_KIND = "full_attention"


class Block:
    """One physical block; it keeps its hash, and so its content, until it is allocated again."""

    __slots__ = ("hash", "number", "references")

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0
        self.hash: bytes | None = None


class BlockPool:
    """All blocks of one engine but number 0, which vLLM never uses."""

    def __init__(self, blocks: int, block_size: int, *, unhashed_first: bool) -> None:
        self.block_size = block_size
        self._blocks = [Block(number) for number in range(1, blocks)]
        self._free = OrderedDict((block.number, block) for block in self._blocks)  # the next to be taken first
        self._copies: dict[bytes, dict[int, Block]] = {}
        self._events: list[Event] = []
        self._unhashed_first = unhashed_first

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds, cached or not."""
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into all blocks."""
        return len(self._blocks) * self.block_size

    def find(self, chain: Chain) -> list[Block]:
        """Return the blocks that the request can reuse: whole ones, and not the one with its last token."""
        found: list[Block] = []
        for block_hash in chain.hashes[: (len(chain.tokens) - 1) // self.block_size]:
            copies = self._copies.get(block_hash)
            if not copies:
                break
            found.append(next(iter(copies.values())))
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block; none of them can be taken until it is released."""
        for block in blocks:
            if not block.references:
                del self._free[block.number]
            block.references += 1

    def allocate(self, count: int) -> list[Block]:
        """Take the blocks that were free for longest, and announce what is lost with them.

        Raises:
            ValueError: fewer are free; the caller must have looked.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        taken: list[Block] = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            self._evict(block)
            block.references = 1
            taken.append(block)
        return taken

    def store(self, chain: Chain, blocks: Sequence[Block], first: int, last: int) -> None:
        """Make blocks [first, last) of a request findable, and announce them as one event.

        A block that equals a cached one becomes a second copy, with its own removal later.
        """
        if first >= last:
            return
        size = self.block_size
        for position in range(first, last):
            block, block_hash = blocks[position], chain.hashes[position]
            block.hash = block_hash
            self._copies.setdefault(block_hash, {})[block.number] = block
        self._events.append(
            BlockStored(
                block_hashes=[announced(block_hash) for block_hash in chain.hashes[first:last]],
                parent_block_hash=announced(chain.hashes[first - 1]) if first else None,
                token_ids=chain.tokens[first * size : last * size],
                block_size=size,
                lora_id=chain.adapter.number if chain.adapter else None,
                medium=_MEDIUM,
                lora_name=chain.adapter.name if chain.adapter else None,
                extra_keys=[None if keys is None else list(keys) for keys in chain.announced_keys(first, last)],
                group_idx=_GROUP,
                kv_cache_spec_kind=_KIND,
            )
        )

    def release(self, blocks: Sequence[Block]) -> None:
        """Give up a request's blocks, its tail first, so that leaves are taken before what leads to them."""
        unhashed: list[Block] = []
        for block in reversed(blocks):
            block.references -= 1
            if block.references:
                continue
            if block.hash is None and self._unhashed_first:
                unhashed.append(block)
            else:
                self._free[block.number] = block
        for block in reversed(unhashed):
            self._free[block.number] = block
            self._free.move_to_end(block.number, last=False)

    def reset(self) -> bool:
        """Forget all content and announce that; return False, and do nothing, while a block is held."""
        if len(self._free) < len(self._blocks):
            return False
        for block in self._blocks:
            block.hash = None
        self._copies.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def table(self) -> dict[int, int]:
        """Return the copies of each hash, by its announced form: what an index should know."""
        return {announced(block_hash): len(copies) for block_hash, copies in self._copies.items()}

    def _evict(self, block: Block) -> None:
        if block.hash is None:
            return
        copies = self._copies[block.hash]
        del copies[block.number]
        if not copies:
            del self._copies[block.hash]
        self._events.append(BlockRemoved(block_hashes=[announced(block.hash)], medium=_MEDIUM, group_idx=_GROUP))
        block.hash = None
