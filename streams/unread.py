"""Records that nobody will ever read: whose they may have been, and asking until those holders have told again.

A log that was trimmed, or deleted and made anew, before a worker read it shows no gap where its holders then only beat
their hearts. Their relays are known from `kv.replicas`, and tell everything again in a new life when asked.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiokafka.partitioner import DefaultPartitioner

from index.store import HolderRow
from ops.registry import read_entries
from schemas.profiles import Holder

_TRIES = 6  # then its relay is gone, and so is the holder


class Unread:
    """One model's holders that may have lost records unseen."""

    def __init__(self, model: str, ask_again: Callable[[str, Holder], Awaitable[None]]) -> None:
        self._model = model
        self._ask_again = ask_again
        self._partitions: set[int] = set()  # whose holders are still to be found
        self._lives: dict[Holder, int] = {}  # waited for -> the life that is not enough
        self._tries: dict[Holder, int] = {}

    def add(self, partition: int) -> None:
        """Doubt the holders whose records this partition carries."""
        self._partitions.add(partition)

    @property
    def pending(self) -> bool:
        """Return whether there is anybody to ask or to find."""
        return bool(self._partitions or self._lives)

    async def ask(self, client: Mapping[str, Any], partitions: int, rows: list[HolderRow]) -> None:
        """Ask those who have not spoken in a new life yet.

        Raises:
            BrokerUnavailable: Kafka did not answer.
        """
        lives = {row.holder: row.life for row in rows}
        if self._partitions:
            found = self._partitions
            for entry in (await read_entries(client)).values():
                profile = entry.profile
                if profile.model == self._model and _partition_of(profile.name, partitions) in found:
                    ranks = tuple(rank.rank for rank in profile.ranks) or (None,)
                    holders = [Holder(profile.name, rank) for rank in ranks]
                    self._lives |= {holder: lives.get(holder, 0) for holder in holders}
            self._partitions = self._partitions - found
        for holder, life in list(self._lives.items()):
            self._tries[holder] = self._tries.get(holder, 0) + 1
            if lives.get(holder, 0) > life or self._tries[holder] > _TRIES:
                del self._lives[holder], self._tries[holder]
            else:
                await self._ask_again(self._model, holder)


def _partition_of(name: str, partitions: int) -> int:
    """Return where relays, whose producers use the default partitioner, write a holder's records."""
    partition: int = DefaultPartitioner()(name.encode(), list(range(partitions)), [])
    return partition
