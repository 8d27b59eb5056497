"""The publishers, the log and the index of one case, and what it asks of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from index.digests import index_digest
from index.fold import Cursor, Flush, fold
from index.hashing import Media, pack_tokens
from index.liveness import BELIEVED, judge
from index.lookup import Prompt, Question, ask, reaches
from index.match import Reach
from index.memory_store import MemoryStore
from index.store import HolderRow
from schemas.events import decode_record
from schemas.profiles import Holder
from tests.cases.dialect import tier_named
from tests.cases.lives import lives_of
from tests.cases.notation import Case, Control, Json, Match, Message, Picture, Stats, Step, Unanswerable, read_steps
from tests.cases.profiles import MODEL, Publisher, publishers_of
from tests.cases.source import Source

_RANKS = 1 << 16  # a higher number is no rank
_FAR_S = 1e9


class Outcome(msgspec.Struct):
    """What became of a case."""

    failures: list[str] = []
    unread: list[str] = []  # fields that nobody here knows; they changed nothing
    asked: int = 0


class _Replica(msgspec.Struct):
    """One replica's lives; each has two numbers, the odd one for its end: an empty life that fences off the rest."""

    publisher: Publisher
    life: int = -1
    ranks: set[int] = set()
    sources: dict[tuple[int, int], Source] = {}  # by life and rank


async def run_case(case: Case) -> Outcome:
    """Return how a case goes.

    Raises:
        NoDecoderError: one of its raw payloads is of a dialect that no decoder reads yet.
        NotationError: the case is not of the notation.
    """
    outcome = Outcome()
    steps = read_steps(case, outcome.unread)
    world = World(case.profile or {}, steps, outcome.unread)
    await world.begin()
    for position, step in enumerate(steps):
        found = await world.take(position, step)
        if found is not None:
            outcome.asked += 1
            outcome.failures += [f"steps[{position}]: {text}" for text in found]
    if not outcome.asked:
        outcome.failures.append("nothing was asked")
    return outcome


class World:
    """Takes a case's steps in order; the answers come out of the index alone."""

    def __init__(self, facts: Json, steps: Sequence[Step], unread: list[str]) -> None:
        self._steps = steps
        self._unread = unread
        self._lives = lives_of(steps)
        publishers = publishers_of(facts, steps, unread)
        self._replicas = {name: _Replica(publisher) for name, publisher in publishers.items()}
        self._store = MemoryStore()
        self._offsets: dict[str, int] = {}  # next of each partition of the log
        self.refused = 0  # messages of ranks that cannot be

    async def begin(self) -> None:
        """Set the index up."""
        await self._store.setup(MODEL)

    async def take(self, position: int, step: Step) -> list[str] | None:
        """Take one step; return what is wrong with the answer where it is a question."""
        match step:
            case Message():
                await self._hear(position, step)
            case Control():
                await self._control(position, step)
            case Match():
                return [*await self._check_index(), *await self._check_match(step)]
            case Stats():
                return [*await self._check_index(), *await self._check_stats(step)]
            case Unanswerable(question):
                return [f"the question {question!r} needs a harness of its own"]
        return None

    # ---- what happens

    async def _hear(self, position: int, message: Message) -> None:
        if not 0 <= message.rank < _RANKS:
            self.refused += 1
            return
        source = await self._source(position, message.sender, message.rank)
        if message.logged:
            partition = message.via.partition(":")[2] or "p0"
            offset = self._offsets[partition] = self._offsets.get(partition, 0) + 1
            number = int(partition.removeprefix("p")) if partition.removeprefix("p").isdigit() else 0
            await self._tell(source.read_log(message), Cursor("log", number, offset))
        else:
            source.hear(message)
            await self._tell(source.say())

    async def _control(self, position: int, control: Control) -> None:
        replica = self._replicas.get(control.sender or "")
        if replica is None:
            if control.name not in ("up", "gone"):
                self._unread.append(f"steps[{position}].ctl: {control.name} of a publisher that says nothing")
            return
        match control.name:
            case "gone" | "down":
                await self._begin_life(replica, self._lives[position] * 2 + 1)
            case "up" | "restart":
                await self._begin_life(replica, self._lives[position] * 2)
            case "replay":
                rank = control.messages[0].rank if control.messages else control.rank or 0
                source = await self._source(position, control.sender or "", rank)
                source.replay(control)
                await self._tell(source.say())
            case "snapshot":
                source = await self._source(position, control.sender or "", control.rank or 0)
                source.take_snapshot(control.messages[0])
                await self._tell(source.say())
            case _:
                self._unread.append(f"steps[{position}].ctl: {control.name}")

    async def _source(self, position: int, sender: str, rank: int) -> Source:
        """Return who speaks. A newer life ends the older ones, and is there before they can say anything."""
        replica = self._replicas[sender]
        replica.ranks.add(rank)
        life = self._lives[position] * 2
        await self._begin_life(replica, max(life, replica.life))
        if (life, rank) not in replica.sources:
            await self._open(replica, life, rank)
        return replica.sources[life, rank]

    async def _begin_life(self, replica: _Replica, life: int) -> None:
        if life < replica.life:
            return  # news of a life that is over
        replica.life = life
        for rank in sorted(replica.ranks):
            if (life, rank) not in replica.sources:
                await self._open(replica, life, rank)

    async def _open(self, replica: _Replica, life: int, rank: int) -> None:
        profile, sender = replica.publisher.profile, replica.publisher.profile.name
        log, replays = [], 0
        for position, step in enumerate(self._steps):
            if not isinstance(step, Message | Control) or step.sender != sender or self._lives[position] * 2 != life:
                continue
            if isinstance(step, Message) and step.logged and step.rank == rank:
                log.append(step)
            elif isinstance(step, Control) and step.name == "replay":
                replays += all(message.rank == rank for message in step.messages)
        source = Source(profile, Holder(sender, rank), replica.publisher.decode, life=life, replays=replays, log=log)
        replica.sources[life, rank] = source
        await self._tell(source.say("gone" if life % 2 else "live"))

    # ---- the index

    async def _tell(self, records: Iterable[bytes], cursor: Cursor | None = None) -> None:
        """Bring records into the index; where it lost some, ask their relay to tell everything again."""
        writes = fold(decode_record(record) for record in records)
        await self._store.apply(Flush(MODEL, cursor, writes))
        for row in await self._store.holders(MODEL):
            if row.broken:
                await self._tell(self._speaker(row.holder).say_again())

    def _speaker(self, holder: Holder) -> Source:
        replica = self._replicas[holder.name]
        return replica.sources[replica.life, holder.rank or 0]

    async def _rows(self) -> dict[str, HolderRow]:
        return {str(row.holder): row for row in await self._store.holders(MODEL)}

    async def _check_index(self) -> list[str]:
        """Return where the index is not what its relay's mirror is."""
        wrong: list[str] = []
        for name, row in (await self._rows()).items():
            source = self._speaker(row.holder)
            mirrored = index_digest(source.engine.mirror.resident())
            if not source.logged and await self._store.digest(MODEL, row.holder) != mirrored:
                wrong.append(f"{name}: the index is not the mirror")
        return wrong

    # ---- answers

    async def _check_match(self, question: Match) -> list[str]:
        rows = await self._rows()
        wrong: list[str] = []
        for name, want in question.want.items():
            key = name if "/" in name else f"{name}/0"
            found = await self._reaches(rows.get(key), question)
            if not isinstance(want, Mapping):
                wrong += [] if want == "unknown" and found is None else [f"{key}: {found}, wanted {want}"]
                continue
            for tier, tokens in want.items():
                if tokens == "unknown":
                    wrong += [] if found is None else [f"{key}: {found}, wanted unknown"]
                    continue
                wrong += _compare(f"{key} {tier}", (found or {}).get(_tier_key(tier), 0), tokens)
        return wrong

    async def _reaches(self, row: HolderRow | None, question: Match) -> dict[str, int] | None:
        """Return the unbroken run on GPU, on any tier, and that run by tier; None: unknown."""
        if row is None or row.profile is None:
            return None
        judgement = judge(row, stale_after_s=_FAR_S, unknown_after_s=_FAR_S)
        if judgement.state not in BELIEVED:
            return None
        spans = self._replicas[row.holder.name].publisher.spans
        prompt = Prompt(
            model=MODEL,
            prompt_tokens=len(question.tokens),
            tokens=pack_tokens(question.tokens),
            adapter=question.adapter,
            salt=question.salt,
            media=_media(question.pictures, row.profile.unit, len(question.tokens), spans=spans),
        )
        asked = ask(row.holder, row.profile)
        anywhere, device = await self._reach(prompt, asked), await self._reach(prompt, _on_device(asked))
        by_tier: dict[str, int] = {tier: tokens for tier, tokens in anywhere.by_tier.items()}  # noqa: C416
        return by_tier | {"gpu": device.tokens, "any": anywhere.tokens}

    async def _reach(self, prompt: Prompt, question: Question) -> Reach:
        return (await reaches(self._store, prompt, [question], whole_prompt=True))[question.holder]

    async def _check_stats(self, question: Stats) -> list[str]:
        rows = await self._rows()
        wrong: list[str] = []
        for name, want in question.want.items():
            key = name if "/" in name else f"{name}/0"
            found = _stats(self._speaker(rows[key].holder)) if key in rows else {}
            for figure, number in want.items():
                if found and figure not in found:
                    wrong.append(f"{key} {figure}: not a figure that is kept here")
                else:
                    wrong += _compare(f"{key} {figure}", found.get(figure, 0), number)
        return wrong


def _stats(source: Source) -> dict[str, int]:
    """Return figures of the mirror, which `_check_index` has compared with the index."""
    mirror = source.engine.mirror
    return {
        "blocks": sum(1 for _ in mirror.resident()),
        "handles": mirror.blocks,
        "nodes": mirror.nodes,
        "orphans": mirror.pending_blocks,
    }


def _on_device(question: Question) -> Question:
    """Return the question about GPU copies alone."""
    classes = tuple(
        rule._replace(tier_bits=tuple(bit for bit in rule.tier_bits if bit[1] == 0)) for rule in question.rules.classes
    )
    return msgspec.structs.replace(question, rules=question.rules._replace(classes=classes))


def _media(pictures: tuple[Picture, ...], unit: int, tokens: int, *, spans: bool) -> tuple[Media, ...]:
    """Return the question's pictures as spans, or as the notation tells them: which ones a block holds, in order."""
    if spans or not unit:
        return tuple(Media(picture.id, picture.at, picture.length) for picture in pictures)
    media: list[Media] = []
    for first in range(0, tokens, unit):
        inside = [p for p in pictures if p.at < first + unit and p.at + p.length > first]
        inside.sort(key=lambda p: p.at)
        media += [Media(picture.id, first + order, unit - order) for order, picture in enumerate(inside)]
    return tuple(media)


def _tier_key(name: str) -> str:
    return name if name in ("gpu", "any") else tier_named(name)


def _compare(what: str, found: int, want: Any) -> list[str]:
    """Return nothing where the number is the one wanted, or one of those that are fine."""
    fine = found in want if isinstance(want, list) else found == want
    return [] if fine else [f"{what}: {found}, wanted {want}"]
