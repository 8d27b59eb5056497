"""vLLM's scheduler without a model: requests in, steps, events and answers out; pure, but for a store beside it.

Source: v1/core/sched/scheduler.py and v1/core/kv_cache_manager.py, 0.14.1 and 0.32.0: first-come policy, chunked
prefill, no async scheduling. Simplified: a request whose load from a store begins gets the blocks of its whole prompt.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from ops.simulator.admission import check_request
from ops.simulator.block_pool import Block, BlockPool
from ops.simulator.chain import Adapter, Chain, HashScheme
from ops.simulator.connector import Connector
from ops.simulator.dialect import Dialect
from schemas.vllm import Event


class Request(msgspec.Struct, frozen=True):
    """One prompt, and the tokens that the engine will have generated for it."""

    id: str
    tokens: Sequence[int]
    completion: Sequence[int]
    adapter: Adapter | None = None
    salt: str | None = None


class Limits(msgspec.Struct, frozen=True):
    """What bounds an engine's steps and requests."""

    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # of one step
    max_model_len: int  # tokens of a request, its completion included


class Finished(msgspec.Struct, frozen=True):
    """One request's end."""

    request: Request
    cached_tokens: int  # of the prompt, when it was first scheduled


class CacheHits(msgspec.Struct):
    """Tokens looked for and found, summed over all requests when they are first scheduled."""

    queried: int = 0  # on the device
    found: int = 0
    queried_outside: int = 0  # in the store: what the device did not have
    found_outside: int = 0


class Plan(msgspec.Struct, frozen=True):
    """Who computes how many tokens in one step."""

    scheduled: list[tuple["_Sequence", int]]
    prefill_tokens: int
    decodes: int


class Outcome(msgspec.Struct, frozen=True):
    """What one step leaves behind."""

    finished: list[Finished]
    events: list[Event]  # of this step, and of accepted resets before it


class _Sequence:
    """One request with its blocks."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "generated",
        "loaded",
        "prefill",
        "request",
        "saved",
        "stored",
    )

    def __init__(self, request: Request, chain: Chain) -> None:
        self.request = request
        self.chain = chain
        self.blocks: list[Block] = []
        self.generated = 0
        self.cached_tokens: int | None = None
        self.begin()

    def begin(self) -> None:
        """Begin anew, without any block."""
        self.blocks = []
        self.computed = 0  # tokens
        self.loaded = 0  # of these, from a store
        self.stored = 0  # blocks that are findable
        self.prefill = len(self.chain.tokens)  # tokens
        self.saved = 0  # blocks of these that a store was given

    @property
    def missing(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.chain.tokens) - self.computed


class Engine:
    """One rank. A step is `schedule`, then `complete`; what a step stores can be hit within it already."""

    def __init__(
        self,
        pool: BlockPool,
        scheme: HashScheme,
        dialect: Dialect,
        limits: Limits,
        connector: Connector | None = None,
    ) -> None:
        self.pool = pool
        self.hits = CacheHits()
        self._connector = connector
        self._scheme = scheme
        self._whole_prompt_fits = dialect.whole_prompt_fits
        self._limits = limits
        self._longest = min(limits.max_model_len, pool.capacity_tokens)
        self._waiting: deque[_Sequence] = deque()  # without any block
        self._loading: list[_Sequence] = []  # in this step
        self._loaded: deque[_Sequence] = deque()  # these go first: they hold blocks
        self._running: list[_Sequence] = []

    @property
    def running(self) -> int:
        """Requests that compute."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that do not, new, loading or preempted."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    @property
    def busy(self) -> bool:
        """Return whether a step would do something; an accepted reset alone waits for a request."""
        return bool(self._running or self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequest: it is empty, generates nothing, or is longer than the engine can hold.
        """
        check_request(request.tokens, request.completion, self._longest)
        chain = Chain(self._scheme, request.tokens, adapter=request.adapter, salt=request.salt)
        self._waiting.append(_Sequence(request, chain))

    def abort(self, request_id: str) -> None:
        """Forget a request; its blocks stay findable. An unknown one is none."""
        for queue in (self._running, self._loading, self._loaded, self._waiting):
            for sequence in queue:
                if sequence.request.id == request_id:
                    queue.remove(sequence)
                    self.pool.release(sequence.blocks)
                    return

    def reset_prefix_cache(self) -> bool:
        """Clear the cache unless a request runs; the event waits for the next step."""
        return self.pool.reset()

    def schedule(self) -> Plan:
        """Decide the next step: running requests first, then what has loaded, then waiting ones in their order."""
        self._end_loads()
        scheduled: list[tuple[_Sequence, int]] = []
        budget = self._limits.max_num_batched_tokens
        budget, preempted = self._schedule_running(scheduled, budget)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        prefill_tokens = decodes = 0
        for sequence, count in scheduled:
            if sequence.computed < len(sequence.request.tokens):
                prefill_tokens += count
            else:
                decodes += 1
            sequence.computed += count
        return Plan(scheduled, prefill_tokens, decodes)

    def complete(self, plan: Plan) -> Outcome:
        """End a step: one token for each request whose known tokens are all computed."""
        finished: list[Finished] = []
        for sequence, _ in plan.scheduled:
            if sequence not in self._running:  # aborted meanwhile
                continue
            self._save(sequence)
            if sequence.missing:  # a chunk of a prefill
                continue
            request = sequence.request
            sequence.chain.append(request.completion[sequence.generated])
            sequence.generated += 1
            if sequence.generated == len(request.completion):
                self._running.remove(sequence)
                self.pool.release(sequence.blocks)
                finished.append(Finished(request, sequence.cached_tokens or 0))
        return Outcome(finished, self.pool.take_events())

    def step(self) -> Outcome:
        """Schedule and complete one step."""
        return self.complete(self.schedule())

    def _schedule_running(self, scheduled: list[tuple[_Sequence, int]], budget: int) -> tuple[int, bool]:
        """Give every running request its tokens; one that finds no block preempts the youngest."""
        preempted = False
        position = 0
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            count = min(sequence.missing, budget)
            while not self._grow(sequence, [], count):
                preempted = True
                youngest = self._running.pop()
                self._preempt(youngest)
                if youngest is sequence:
                    return budget, preempted
            scheduled.append((sequence, count))
            budget -= count
            position += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: list[tuple[_Sequence, int]], budget: int) -> None:
        """Start waiting requests while there is room; the first that finds none holds up those behind it."""
        while budget > 0 and len(self._running) < self._limits.max_num_seqs and (self._loaded or self._waiting):
            queue = self._loaded or self._waiting
            sequence = queue[0]
            hit: list[Block] = []
            if queue is self._waiting:
                hit = self.pool.find(sequence.chain)
                sequence.computed = len(hit) * self.pool.block_size
                loadable = self._loadable(sequence)
                if loadable:
                    if not self._load(sequence, hit, loadable):
                        return
                    continue
            count = min(sequence.missing, budget)
            fits = not self._whole_prompt_fits or self._needed(sequence, hit, sequence.missing) <= self.pool.free_blocks
            if not fits or not self._grow(sequence, hit, count):
                sequence.computed = 0
                return
            self._note_hits(sequence)
            self._running.append(queue.popleft())
            scheduled.append((sequence, count))
            budget -= count

    def _note_hits(self, sequence: _Sequence) -> None:
        """Count what a request found, when it is first scheduled."""
        if sequence.cached_tokens is not None:
            return
        sequence.cached_tokens = sequence.computed
        prompt, found = len(sequence.request.tokens), sequence.computed - sequence.loaded
        self.hits.queried += prompt
        self.hits.found += found
        if self._connector is not None:
            self.hits.queried_outside += prompt - found
            self.hits.found_outside += sequence.loaded

    # ---- the store

    def _loadable(self, sequence: _Sequence) -> int:
        """Return how many tokens behind the device's hit a store has."""
        return 0 if self._connector is None else self._connector.loadable_tokens(sequence.chain, sequence.computed)

    def _load(self, sequence: _Sequence, hit: Sequence[Block], tokens: int) -> bool:
        """Begin to load the first waiting request's tokens, which takes this step; False: too few blocks are free."""
        if not self._take(sequence, hit, sequence.missing):
            sequence.computed = 0
            return False
        sequence.computed += tokens
        sequence.loaded = tokens
        self._loading.append(self._waiting.popleft())
        return True

    def _end_loads(self) -> None:
        """Make findable what was loaded."""
        for sequence in self._loading:
            self._make_findable(sequence, sequence.computed)
        self._loaded.extend(self._loading)
        self._loading.clear()

    def _save(self, sequence: _Sequence) -> None:
        """Give the store what is computed of the prefill, from its start on; it takes what it lacks."""
        whole = min(sequence.computed, sequence.prefill) // self.pool.block_size
        if self._connector is not None and whole > sequence.saved:
            self._connector.save(sequence.chain.hashes[:whole])
            sequence.saved = whole

    # ---- blocks

    def _needed(self, sequence: _Sequence, hit: Sequence[Block], count: int) -> int:
        """Return the free blocks that computing `count` more tokens takes, those of the hit included."""
        blocks = -(-(sequence.computed + count) // self.pool.block_size)
        unheld = sum(not block.references for block in hit)
        return max(0, blocks - len(sequence.blocks) - len(hit)) + unheld

    def _grow(self, sequence: _Sequence, hit: Sequence[Block], count: int) -> bool:
        """Take the blocks for `count` more tokens and make those findable that get full; False: too few are free."""
        if not self._take(sequence, hit, count):
            return False
        self._make_findable(sequence, sequence.computed + count)
        return True

    def _take(self, sequence: _Sequence, hit: Sequence[Block], count: int) -> bool:
        """Take the hit, and the blocks for `count` more tokens; False, and nothing is taken: too few are free."""
        if self._needed(sequence, hit, count) > self.pool.free_blocks:
            return False
        self.pool.hold(hit)
        sequence.blocks += hit
        sequence.stored += len(hit)
        sequence.blocks += self.pool.allocate(self._needed(sequence, (), count))
        return True

    def _make_findable(self, sequence: _Sequence, tokens: int) -> None:
        full = tokens // self.pool.block_size
        self.pool.store(sequence.chain, sequence.blocks, sequence.stored, full)
        sequence.stored = max(sequence.stored, full)

    def _preempt(self, sequence: _Sequence) -> None:
        """Put a running request back to the head of the queue; it begins again, with what is still cached."""
        self.pool.release(sequence.blocks)
        sequence.begin()
        self._waiting.appendleft(sequence)
