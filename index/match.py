"""The hit rule: what an engine would reuse of a prompt, from where its blocks are; pure.

DESIGN 4.7. An engine reuses the longest L, a multiple of its alignment and below the prompt's length, on which all
of its cache groups agree: a full group needs every block of [0, L), a window of w tokens the blocks that cover the
last w - 1 before L, a recurrent state a checkpoint that ends exactly at L.

Source: vLLM v1/core/single_type_kv_cache_manager.py and kv_cache_coordinator.py (find_longest_cache_hit),
distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py and v1/simple_kv_offload/manager.py
(get_num_new_matched_tokens), 0.12 to 0.32; SGLang: engines/other-engines.md 1.5 and 1.7, managers/schedule_batch.py
(init_next_round_input: the last token is left out before pairs are made), mem_cache/hiradix_cache.py (load_back).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from index.rules import ClassRule, LowerRule, Rules
from schemas.profiles import TIERS, Tier


class Run(NamedTuple):
    """Consecutive blocks of a prompt's chain with one residency on one holder."""

    start: int  # block
    length: int  # blocks
    residency: int  # bits of the profile's pairs, never 0


class Reach(msgspec.Struct, frozen=True):
    """The unbroken run that one holder's engine would reuse."""

    tokens: int
    by_tier: dict[Tier, int]  # tokens, summing to `tokens`; a block counts under its fastest tier
    upper_bound: bool = False  # the engine does not report all that it needs
    pools: dict[str, dict[Tier, int]] = {}  # the pool tier's tokens, by pool and its own tier
    marks: tuple[str, ...] = ()  # why the answer is less certain than others


NOTHING = Reach(0, {})


def reusable_tokens(runs: Sequence[Run], rules: Rules, prompt_tokens: int, *, whole_prompt: bool = False) -> Reach:
    """Return the longest prefix that this holder's engine would reuse.

    Args:
        runs: the holder's residency along the prompt's chain, in prompt order, holes left out; empty gives 0.
        rules: of the holder's profile.
        prompt_tokens: length of the prompt; the engine computes at least its last token itself.
        whole_prompt: what the engine leaves out of a match is counted too, for logs that show the match alone.
    Returns:
        Tokens, split by tier; marked where they are an upper bound.

    Cost: O(runs) for a plain model, O(runs log runs) with windows or states.
    """
    if not runs or not rules.classes or (rules.upper_bound and not rules.credit):
        return NOTHING
    limit = prompt_tokens - rules.pairs - (not whole_prompt)
    if rules.lower is not None and any(position for c in rules.classes for _, position in c.tier_bits):
        return _device_then_lower(runs, rules, rules.lower, limit, prompt_tokens)
    if rules.plain:
        return _unbroken(runs, rules, limit // rules.unit, 0 if whole_prompt else rules.least_load)
    layers = [_Layer(c, runs, rules, c.tier_bits, drafting=rules.drafting) for c in rules.classes]
    length = _longest(layers, rules, limit, prompt_tokens)
    return Reach(length, _split(layers, rules.unit, length), rules.upper_bound) if length else NOTHING


def _unbroken(runs: Sequence[Run], rules: Rules, most: int, least_load: int) -> Reach:
    """Return what a plain model reuses: the unbroken run from the first block on, at most `most` blocks.

    Of what follows the device's part less than `least_load` tokens are not loaded.
    """
    end = 0
    by_tier: dict[Tier, int] = {}
    for start, length, residency in runs:
        fastest = next((position for bit, position in rules.classes[0].tier_bits if residency & bit), None)
        if start != end or end >= most or fastest is None:
            break
        end = min(start + length, most)
        tier = TIERS[fastest]
        by_tier[tier] = by_tier.get(tier, 0) + (end - start) * rules.unit
    device = by_tier.get("gpu", 0)
    if end * rules.unit - device < least_load:
        return Reach(device, {"gpu": device}, rules.upper_bound) if device else NOTHING
    return Reach(end * rules.unit, by_tier, rules.upper_bound) if end else NOTHING


# by position in TIERS: what a fastest tier so far becomes when another class needs this one
_AT_LEAST = [bytes(max(least, other) for other in range(256)) for least in range(len(TIERS))]


class _Layer:
    """Where one group class has its blocks: intervals of whole blocks, and the ends of partial ones (tokens)."""

    def __init__(
        self,
        rule: ClassRule,
        runs: Iterable[Run],
        rules: Rules,
        tier_bits: Sequence[tuple[int, int]],
        chunk: int = 1,
        *,
        drafting: bool = False,
    ) -> None:
        self.kind = rule.kind
        self.window = rule.window
        self.block = rule.block * chunk
        self.alignment = rules.alignment
        # what drafting takes again must be there: a block, or a unit of a full group that may end inside a block
        # (vLLM kv_cache_utils.eagle_proof_margin); a state takes nothing
        self.ahead = 0
        if drafting and rule.kind != "state":
            self.ahead = min(rules.alignment, rule.block) if rule.kind == "full" else rule.block
        self.unit = rules.unit
        self.tier_bits = tier_bits
        mask = sum(bit for bit, _ in tier_bits)
        self.runs = [run for run in runs if run.residency & mask]
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.partial: list[int] = []
        per_block = self.block // rules.unit
        # a block longer than the unit is marked at its last unit; any other unit marked is a partial block's end
        partial = per_block > 1 and chunk == 1 and rules.alignment < self.block
        for run in self.runs:
            stop = run.start + run.length
            first, last = run.start // per_block * self.block, stop // per_block * self.block
            if last > first:
                if self.ends and self.ends[-1] == first:
                    self.ends[-1] = last
                else:
                    self.starts.append(first)
                    self.ends.append(last)
            if partial:
                self.partial += [(n + 1) * rules.unit for n in range(run.start, stop) if (n + 1) % per_block]

    def down(self, length: int, bound: int) -> int:
        """Return the longest hit of this class alone that is at most `length`, looking no further than `bound`."""
        length = min(length, bound - self.ahead)
        if self.kind == "full":
            length = min(length, self._found(bound) - self.ahead)
        length -= length % self.alignment
        while length > 0 and not self._allows(length):
            length = self._next_below(length)
        return max(0, length)

    def end_of(self, first: int) -> int:
        """Return where the unbroken whole blocks from `first` on end; `first` where there are none."""
        position = bisect_right(self.starts, first) - 1
        return max(first, self.ends[position]) if position >= 0 else first

    def _found(self, bound: int) -> int:
        """Return what a full group finds from the start on: whole blocks, then the last partial one right after."""
        whole = min(self.end_of(0), bound // self.block * self.block)
        position = bisect_left(self.partial, min(bound + 1, whole + self.block)) - 1
        return max(whole, self.partial[position]) if position >= 0 else whole

    def _allows(self, length: int) -> bool:
        if self.kind == "full":
            return True
        part = length % self.block
        if self.kind == "state":
            return self._ends_at(length) if part else self._unbroken(length - self.block, length)
        last = length + self.ahead
        return not part and self._unbroken(max(0, length - self.window + 1) // self.block * self.block, last)

    def _unbroken(self, first: int, last: int) -> bool:
        """Return whether every whole block inside [first, last) tokens is there."""
        return last <= first or self.end_of(first) >= last

    def _ends_at(self, length: int) -> bool:
        position = bisect_left(self.partial, length)
        return position < len(self.partial) and self.partial[position] == length

    def _next_below(self, length: int) -> int:
        """Return the next candidate: inside the interval below, at its end, or at a partial block's end."""
        below = length - self.alignment
        position = bisect_left(self.starts, below + self.ahead) - 1
        whole = min(below, self.ends[position] - self.ahead) if position >= 0 else 0
        near = bisect_right(self.partial, below)
        candidate = max(whole, self.partial[near - 1] if near else 0)
        return candidate - candidate % self.alignment

    def tier_at(self, first: int, last: int, tiers: bytearray) -> None:
        """Raise `tiers[unit number]` to this class's fastest tier for the blocks inside [first, last) tokens."""
        per_block = self.block // self.unit
        end = -(-last // self.unit)
        covered = 0
        for run in self.runs:
            low = max(first // self.unit, run.start // per_block * per_block)
            high = min(end, (run.start + run.length) // per_block * per_block)
            if low < high:
                covered = high
                tiers[low:high] = tiers[low:high].translate(_AT_LEAST[self._fastest(run)])
        if covered < end:  # the hit ends inside a block, in the partial one that reaches that far
            low = max(first, last // self.block * self.block) // self.unit
            run = next(run for run in self.runs if run.start + run.length >= end)
            tiers[low:end] = tiers[low:end].translate(_AT_LEAST[self._fastest(run)])

    def _fastest(self, run: Run) -> int:
        return next(position for bit, position in self.tier_bits if run.residency & bit)


def _longest(layers: Sequence[_Layer], rules: Rules, limit: int, prompt_tokens: int) -> int:
    """Return the longest hit on which all classes agree, after what drafting takes."""
    bound = prompt_tokens if rules.drop_ahead else limit
    length = limit
    while length > 0:
        agreed = length
        for layer in layers:
            agreed = layer.down(agreed, bound)
        if agreed == length:
            return length
        length = agreed
    return 0


def _split(layers: Sequence[_Layer], unit: int, length: int) -> dict[Tier, int]:
    """Return the hit's tokens by tier: each block's slowest among the classes that are needed there."""
    if all(len(layer.tier_bits) == 1 and layer.tier_bits[0][1] == 0 for layer in layers):
        return {"gpu": length}
    tiers = bytearray(length // unit)
    for layer in layers:
        back = length if layer.kind == "full" else layer.window - 1 if layer.kind == "window" else layer.block
        layer.tier_at(max(0, length - back), length, tiers)
    return _counted(tiers, unit)


def _counted(tiers: bytes | bytearray, unit: int) -> dict[Tier, int]:
    counts = {tier: tiers.count(position) * unit for position, tier in enumerate(TIERS)}
    return {tier: tokens for tier, tokens in counts.items() if tokens}


def _device_then_lower(runs: Sequence[Run], rules: Rules, lower: LowerRule, limit: int, prompt_tokens: int) -> Reach:
    """Return the device's hit, continued from a lower tier from where it ends (vLLM's connectors)."""
    unit = rules.unit
    device = [
        _Layer(c, runs, rules, [bit for bit in c.tier_bits if bit[1] == 0], drafting=rules.drafting)
        for c in rules.classes
    ]
    length = _longest(device, rules, limit, prompt_tokens)
    layers = [
        _Layer(c, runs, rules, [bit for bit in c.tier_bits if bit[1] > 0], lower.chunk, drafting=lower.drafting)
        for c in rules.classes
    ]
    if lower.from_start:
        reach = max(length, min(layer.end_of(0) for layer in layers))
    elif lower.last_token == "never":
        bound = prompt_tokens if rules.drop_ahead else limit
        reach = _tail_hit(layers, length, limit, bound, rules.alignment)
    else:
        reach = _chunk_hit(layers, length, prompt_tokens, drafting=lower.drafting)
    if lower.last_token == "uncounted":
        reach = min(reach, max(length, prompt_tokens - 1))
    by_tier: dict[Tier, int] = {"gpu": length} if length else {}
    if reach > length:
        tiers = bytearray(-(-reach // unit))
        for layer in layers:
            layer.tier_at(length, reach, tiers)
        loaded = _counted(tiers[length // unit :], unit)
        slowest: Tier = max(loaded, key=TIERS.index)
        loaded[slowest] -= sum(loaded.values()) - (reach - length)
        by_tier.update(loaded)
    return Reach(reach, by_tier, rules.upper_bound) if reach else NOTHING


def _tail_hit(layers: Sequence[_Layer], length: int, limit: int, bound: int, alignment: int) -> int:
    """Return the hit rule applied to what follows the device's hit (SimpleCPUOffloadConnector)."""
    reach = limit
    while reach > length:
        agreed = reach
        for layer in layers:
            end = min(layer.end_of(length), bound) - layer.ahead
            if layer.kind == "full":
                agreed = min(agreed, end)
            elif end < agreed:  # a short run that starts at the device's end is enough
                agreed = max(layer.down(agreed, bound), end)
        agreed -= agreed % alignment
        if agreed == reach:
            return reach
        reach = agreed
    return length


def _chunk_hit(layers: Sequence[_Layer], length: int, prompt_tokens: int, *, drafting: bool) -> int:
    """Return where whole chunks from the one that holds the device's end on lead to (OffloadingConnector).

    The chunk that straddles the device's end must itself be there, and less than a chunk is not loaded. With a
    single full group a load may cover the whole prompt, else one token less, block or not. With drafting each group
    looks for a chunk more than it keeps.
    """
    drafted: set[_Layer] = set()
    most = prompt_tokens - (len(layers) > 1)
    if any(layer.kind == "state" for layer in layers):
        most -= most % min(layer.block for layer in layers if layer.kind == "state")
    # full groups once, then windows, the longest first, and states, again for as long as one of them shortens the load
    order = sorted(layers, key=lambda layer: (layer.kind != "full", layer.kind == "state", -layer.window))
    before = -1
    while most != before:
        before = most
        for layer in order:
            chunk = layer.block
            whole = prompt_tokens // chunk * chunk
            most = min(most, whole)
            if most - length < chunk:
                return length
            first = length // chunk * chunk
            taken = chunk if drafting and layer not in drafted else 0
            drafted.add(layer)
            last = min(-(-most // chunk) * chunk + taken, whole)
            edge = min(layer.end_of(first), last) if layer.kind == "full" else _right_edge(layer, first, last, taken)
            most = min(most, edge - taken)
            if edge == first or most - length < chunk:
                return length
        order = [layer for layer in order if layer.kind != "full"]
    return most


def _right_edge(layer: _Layer, first: int, last: int, taken: int) -> int:
    """Return the right end of the last run of enough chunks in [first, last), or of the run that begins at first.

    Enough are those of the window, or of a state's checkpoint, and the `taken` tokens that drafting leaves out.
    """
    need = layer.block if layer.kind == "state" else -(-layer.window // layer.block) * layer.block
    need += taken
    for position in range(bisect_left(layer.starts, last) - 1, -1, -1):
        start, end = max(first, layer.starts[position]), min(last, layer.ends[position])
        if end - start >= need or (start == first and end > first):
            return end
    return first
