"""SGLang's scheduler without a model: requests in, steps, events and answers out; pure.

A step computes prompts, or one token of every running request; it never mixes them. What a request computed is in the
tree when its step ends, so requests of one step do not share it.

Source: managers/scheduler.py, managers/schedule_policy.py and managers/schedule_batch.py of the 0.5.23 wheel:
first-come policy, chunked prefill, no overlap. Simplified: all tokens that admitted requests may still generate are
reserved (SGLang reserves a share, and retracts requests when it was too little).
"""

from collections import deque

from ops.simulator.admission import check_request
from ops.simulator.sglang.cache import Cache
from ops.simulator.sglang.pages import Key, key_of
from ops.simulator.sglang.requests import Finished, Limits, Outcome, Plan, Request, Running
from ops.simulator.sglang.tree import Match


class Engine:
    """One rank. A step is `schedule`, then `complete`; steps without requests end copies and publish."""

    def __init__(self, cache: Cache, limits: Limits, *, pairs: bool = False) -> None:
        self.cache = cache
        self._limits = limits
        self._pairs = pairs
        self._longest = min(limits.context_length, (cache.capacity - 1) * cache.page_size - 1)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._chunked: Running | None = None

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    @property
    def own_pages(self) -> int:
        """Pages that requests hold and the tree does not."""
        return sum(sequence.pages for sequence in self._held)

    @property
    def busy(self) -> bool:
        """Return whether a step would do something."""
        return bool(self.running or self._waiting or self.cache.unsettled)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequest: it is empty, generates nothing, or is longer than the engine can hold.
        """
        check_request(request.tokens, request.completion, self._longest)
        self._waiting.append(Running(request))

    def abort(self, request_id: str) -> None:
        """End a request; what it computed stays findable. An unknown one is none."""
        for sequence in self._held:
            if sequence.request.id == request_id:
                self._release(sequence)
                return
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.id != request_id)

    def reset_prefix_cache(self) -> bool:
        """Flush the cache, unless a request is there; the next step tells it."""
        if self.running or self._waiting:
            return False
        self.cache.reset()
        return True

    def schedule(self) -> Plan:
        """Decide the next step: prompts first, and while there are any no token is generated."""
        self.cache.settle()
        plan = Plan(self._prefills(), [])
        if not plan.prefills:
            plan.running.extend(self._decodes())
        return plan

    def complete(self, plan: Plan) -> Outcome:
        """End a step: what was computed goes into the tree, and finished requests go."""
        finished: list[Finished] = []
        for sequence, count in plan.prefills:
            if sequence is self._chunked or sequence in self._running:  # not aborted meanwhile
                self._computed(sequence, count, finished)
        for sequence in plan.running:
            if sequence in self._running:
                self._computed(sequence, 1, finished)
        return Outcome(finished, self.cache.take_events())

    def step(self) -> Outcome:
        """Schedule and complete one step."""
        return self.complete(self.schedule())

    # ---- prompts

    def _prefills(self) -> list[tuple[Running, int]]:
        """Admit waiting requests in their order; the first without room holds up those behind it."""
        budget = self._limits.chunked_prefill_size
        chosen: list[tuple[Running, int]] = []
        if self._chunked is not None:
            sequence, self._chunked = self._chunked, None
            budget -= self._choose(sequence, budget, chosen)
        while self._waiting and budget > 0 and self.running < self._limits.max_running_requests:
            if self._chunked is not None or not self._admit(self._waiting[0], budget):
                break
            budget -= self._choose(self._waiting.popleft(), budget, chosen)
        self._allocate(chosen)
        return chosen

    def _choose(self, sequence: Running, budget: int, chosen: list[tuple[Running, int]]) -> int:
        """Let a prompt have its next tokens, in chunks that end at whole pages; return how many."""
        size, missing = self.cache.page_size, len(sequence.tokens) - sequence.computed
        count = missing if missing <= budget else budget // size * size
        if count < missing:
            self._chunked = sequence
        else:
            self._running.append(sequence)
        if count:
            chosen.append((sequence, count))
        return count

    def _admit(self, sequence: Running, budget: int) -> bool:
        """Take over what of a prompt is cached; return False, and do nothing, where there is no room for the rest."""
        cache, size = self.cache, self.cache.page_size
        match = cache.match(self._key(sequence, len(sequence.tokens) - 1))  # the last token is computed in any case
        cache.lock(match.device)
        admitted = self._fits(sequence, match, budget)
        if admitted:
            loaded = cache.load_back(match) if match.host_pages else 0
            sequence.node = match.best if loaded else match.device
            cache.lock(sequence.node)
            sequence.owned = match.device_pages + loaded
            sequence.computed = sequence.owned * size
            if sequence.cached_tokens is None:
                sequence.cached_tokens, sequence.host_tokens = sequence.computed, loaded * size
        cache.unlock(match.device)
        return admitted

    def _fits(self, sequence: Running, match: Match, budget: int) -> bool:
        """Return whether all that a request may take has room beside all others, and its next chunk in this step."""
        cache, size = self.cache, self.cache.page_size
        missing = len(sequence.tokens) - match.device_pages * size  # what is loaded back takes room too
        room = cache.available * size - self._reserved
        computed = missing - match.host_pages * size
        return missing + sequence.remaining + size < room and (computed <= budget or budget >= size)

    def _allocate(self, chosen: list[tuple[Running, int]]) -> None:
        """Give prompts their pages; room is made for a page more each, as by SGLang's estimate."""
        cache, size = self.cache, self.cache.page_size
        if not chosen:
            return
        spare = size * len(chosen) if size > 1 else 0
        cache.make_room(sum(count for _, count in chosen) + spare)
        for sequence, count in chosen:
            self._take(sequence, sequence.computed + count)

    # ---- tokens

    def _decodes(self) -> list[Running]:
        """Return the requests that have room for their next token; while copies hold pages there may be too little."""
        size = self.cache.page_size
        growing = [s for s in self._running if -(-(s.computed + 1) // size) > s.owned + s.pages]
        self.cache.make_room(len(growing) * size)
        stalled = growing[self.cache.free :]
        chosen = [sequence for sequence in self._running if sequence not in stalled]
        for sequence in chosen:
            self._take(sequence, sequence.computed + 1)
        return chosen

    @property
    def _reserved(self) -> int:
        """Tokens that admitted requests may still take."""
        size = self.cache.page_size
        return sum(len(s.tokens) + s.remaining + size - (s.owned + s.pages) * size for s in self._held)

    @property
    def _held(self) -> list[Running]:
        return [*self._running, *([self._chunked] if self._chunked is not None else [])]

    def _take(self, sequence: Running, tokens: int) -> None:
        pages = -(-tokens // self.cache.page_size) - sequence.owned - sequence.pages
        self.cache.take(pages)
        sequence.pages += pages

    def _computed(self, sequence: Running, count: int, finished: list[Finished]) -> None:
        """Note computed tokens; where they were the last known ones, the next is generated."""
        sequence.computed += count
        if sequence.computed < len(sequence.tokens):  # a chunk
            self._checkpoint(sequence)
            return
        sequence.tokens.append(sequence.request.completion[sequence.generated])
        sequence.generated += 1
        if not sequence.remaining:
            finished.append(Finished(sequence.request, sequence.cached_tokens or 0, sequence.host_tokens))
            self._release(sequence)
        elif sequence.generated == 1:
            self._checkpoint(sequence)

    def _checkpoint(self, sequence: Running) -> None:
        """Let the tree have what is computed, in whole pages; the request goes on with the tree's copy."""
        key = self._key(sequence, sequence.computed)
        if len(key.pages) < sequence.owned:  # nothing new: the pairs of the computed tokens are fewer than the hit's
            return
        inserted = self.cache.insert(key, owned=sequence.owned, counted=sequence.inserted)
        sequence.pages -= len(key.pages) - sequence.owned
        sequence.owned = sequence.inserted = len(key.pages)
        self.cache.lock(inserted.node)
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        sequence.node = inserted.node

    def _release(self, sequence: Running) -> None:
        """End a request: what it computed is the tree's, the rest is free."""
        self._checkpoint(sequence)
        self.cache.give_back(sequence.pages)
        sequence.pages = 0
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
            sequence.node = None
        if sequence is self._chunked:
            self._chunked = None
        else:
            self._running.remove(sequence)

    def _key(self, sequence: Running, tokens: int) -> Key:
        return key_of(sequence.tokens[:tokens], sequence.request.namespace, self.cache.page_size, pairs=self._pairs)
