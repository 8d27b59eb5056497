"""Finds where an engine's blocks stand in our own chains, by tokens, parents and namespaces of its stores; pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from index.hashing import Media, Namespace, Tokens, chain_hashes, pack_tokens, root_hash
from relays.cache.block_table import BlockTable, Entry, Node
from relays.cache.learnt import LearntProfile
from relays.engine_events import EngineHash, Stored


class HashCheck(Protocol):
    """Recomputes an engine's own hash of a prompt's first block, where seed and algorithm are known."""

    def first_block(self, stored: Stored) -> EngineHash | None:
        """Return the engine's name of the block that starts this prompt, or None where it cannot be told."""


class Placer:
    """Gives the entries of one table their nodes."""

    def __init__(
        self,
        table: BlockTable,
        learnt: LearntProfile,
        counts: Counter[str],
        secret: bytes,
        hash_check: HashCheck | None,
    ) -> None:
        self._table = table
        self._learnt = learnt
        self._counts = counts
        self._secret = secret
        self._hash_check = hash_check
        self._roots: dict[tuple[str | None, str | None, bool], int] = {}
        self._ready: list[Stored] = []  # waited for a parent that has its place now

    def can_place(self, event: Stored) -> bool:
        """Return whether the blocks get a place at once; where removals cascade no others are kept.

        A block whose parent is not known here is older than this life's first event, or below one that is: its own end
        may be told by the end of any ancestor, so it must not wait for one either.
        """
        if event.namespace_known and (event.parent is None or self._table.is_placed(event.parent)):
            return True
        self._counts["parent_unknown" if event.namespace_known else "namespace_unknown"] += len(event.hashes)
        return False

    def place(self, event: Stored) -> None:
        """Place a store's blocks, and those of all stores that waited for one of them."""
        if not event.namespace_known:
            self._give_up(event, "namespace_unknown")
            return
        self._ready.append(event)
        self._place_ready()

    def learn(self, depth: int, path: Sequence[int], blocks: Sequence[int], names: Sequence[EngineHash]) -> None:
        """Take in where engine hashes stand, from a replica that knows their tokens (DESIGN 6, pools).

        Args:
            depth: of the first of `blocks`; `path` leads up to it from the last multiple of 128.
            names: what the replica's engine calls the blocks, parallel to them; 0: nothing.
        """
        node: Node | None = None
        for position, block_hash in enumerate((*path, *blocks)):
            node = self._table.node_at(block_hash, node, depth - len(path) + position)
            name = names[position - len(path)] if position >= len(path) else 0
            if name:
                self._attach(self._table.idle_entry_of(name), node)
        self._place_ready()
        if node is not None:
            self._table.touch_node(node)

    def contradicts(self, event: Stored) -> bool:
        """Return whether the event gives a block that is held here another engine hash than the one known."""
        if event.parent is not None or event.masked or not event.tokens or not event.namespace_known:
            return False
        unit = self._learnt.profile.unit
        hashes = chain_hashes(self._root(event), pack_tokens(event.tokens), unit)
        per_block = event.block_size // unit
        for number, name in enumerate(event.hashes):
            node = self._table.nodes.get(hashes[(number + 1) * per_block - 1])
            if node is not None and any(entry.name != name and entry.copies for entry in node.entries):
                return True
        return False

    def _place_ready(self) -> None:
        while self._ready:
            self._place_one(self._ready.pop())

    def _place_one(self, event: Stored) -> None:
        """Find the blocks' places, or keep the event until its parent's place is known."""
        if event.masked:
            # which block of the range each hash names is known once another group's event has placed it
            self._counts["masked_unplaced"] += sum(not self._table.is_placed(name) for name in event.hashes)
            return
        if event.media and event.block_size > self._learnt.profile.unit and self._all_placed(event):
            return  # a smaller block has told more exactly where its media end
        parent = None
        if event.parent is None:
            if self._namespace_is_hidden(event):
                self._give_up(event, "namespace_hidden")
                return
        else:
            known = self._table.entries.get(event.parent)
            if known is not None and known.opaque:
                self._give_up(event, "namespace_hidden")
                return
            if known is None or known.node is None:
                self._wait(event.parent, event)
                return
            parent = known.node
        named = self._without_nameless_media(event)
        if named.hashes:
            self._link(named, parent)

    def _all_placed(self, event: Stored) -> bool:
        return all(map(self._table.is_placed, event.hashes))

    def _namespace_is_hidden(self, event: Stored) -> bool:
        """Return whether the engine's own hash shows a namespace that the event does not (DESIGN 4.13)."""
        if self._hash_check is None or not event.hashes or event.masked:
            return False
        expected = self._hash_check.first_block(event)
        return expected is not None and expected != event.hashes[0]

    def _without_nameless_media(self, event: Stored) -> Stored:
        """Return the blocks before the first one with a placeholder whose picture the event does not name."""
        placeholders, size = self._learnt.profile.placeholders, event.block_size
        for number in range(len(event.hashes) if placeholders else 0):
            block = event.tokens[number * size : (number + 1) * size + event.pairs]
            if any(token in placeholders for token in block) and not (event.media and event.media[number]):
                self._give_up(msgspec.structs.replace(event, hashes=event.hashes[number:]), "media_hidden")
                return msgspec.structs.replace(
                    event,
                    hashes=event.hashes[:number],
                    tokens=event.tokens[: number * size + event.pairs],
                    media=event.media[:number],
                )
        return event

    def _link(self, event: Stored, parent: Node | None) -> None:
        unit = self._learnt.profile.unit
        if event.block_size % unit:
            self._counts["block_size_off_unit"] += 1
            return
        per_block = event.block_size // unit
        table = self._table
        node = parent
        for number, block_hash in enumerate(self._block_hashes(event, parent)):
            if event.only_known and block_hash not in table.nodes:
                self._counts["chain_unknown"] += len(event.hashes) - number // per_block
                break
            node = table.node_at(block_hash, node, node.depth + 1 if node else 0)
            if (number + 1) % per_block == 0:
                entry = table.entries.get(event.hashes[number // per_block])
                if entry is not None:
                    self._attach(entry, node)
        if node is not None and node is not parent:
            table.touch_node(node)  # so that a range nobody holds is let go of

    def _block_hashes(self, event: Stored, parent: Node | None) -> list[int]:
        start = parent.hash if parent else self._root(event)
        tokens = pack_tokens(event.tokens)
        if event.media:
            return self._hashes_with_media(event, start, tokens)
        return chain_hashes(start, tokens, self._learnt.profile.unit, pairs=event.pairs)

    def _hashes_with_media(self, event: Stored, start: int, tokens: Tokens) -> list[int]:
        """Hash a range whose blocks carry media keys, exactly as the event lists them for each block."""
        unit, size = self._learnt.profile.unit, event.block_size
        hashes: list[int] = []
        width = 8 if tokens.wide else 4
        view = memoryview(tokens.data)
        for block, keys in enumerate(event.media):
            media = [Media(key.id, key.offset, size - key.offset) for key in keys]
            end = (block + 1) * size + (1 if event.pairs else 0)
            part = Tokens(view[block * size * width : end * width], tokens.wide)
            hashes += chain_hashes(hashes[-1] if hashes else start, part, unit, pairs=event.pairs, media=media)
        return hashes

    def _attach(self, entry: Entry, node: Node) -> None:
        if entry.node is node or (entry.node is None and entry.opaque):
            return
        if entry.node is not None:
            # one engine hash for two contents: neither is credited while copies of it live
            self._counts["hash_names_two_blocks"] += 1
            self._table.detach(entry)
            entry.opaque = True
            return
        self._table.attach(entry, node)
        self._ready += self._table.waiting.take(entry.name)

    def _root(self, event: Stored) -> int:
        key = (event.adapter, event.salt, event.pairs)
        root = self._roots.get(key)
        if root is None:
            profile = self._learnt.profile
            namespace = Namespace(profile.model, profile.unit, event.pairs, event.adapter, event.salt)
            root = self._roots[key] = root_hash(namespace, self._secret)
        return root

    def _give_up(self, event: Stored, reason: str) -> None:
        for name in event.hashes:
            entry = self._table.entries.get(name)
            if entry is not None and entry.node is None and not entry.opaque:
                entry.opaque = True
                self._counts[reason] += 1

    def _wait(self, parent: EngineHash, event: Stored) -> None:
        if not event.hashes:
            return
        self._counts["parent_unknown"] += len(event.hashes)
        units = len(event.tokens) // self._learnt.profile.unit
        self._counts["pending_dropped"] += self._table.waiting.add(parent, event, units)
