"""What a relay's process counts of its holders."""

from itertools import count

from prometheus_client import REGISTRY

from relays.engine import EngineRank
from relays.source import Owner
from relays.trtllm_poller import PulledRank
from schemas.profiles import Holder
from tests.support.engines import profile, stored, tokens


def blocks(rank: int) -> float | None:
    labels = {"engine": "vllm", "model": "m", "holder": f"counted/{rank}"}
    return REGISTRY.get_sample_value("kvatlas_relay_blocks", labels)


def test_each_rank_has_a_count_of_blocks_of_its_own() -> None:
    """What one rank of a process holds does not hide what another does."""
    lives = count(1)
    for number, held in enumerate([3, 5]):
        engine = EngineRank(profile(), Holder("counted", number), next(lives))
        rank = PulledRank(engine, Owner(lambda: next(lives), lambda: None, 30.0))
        engine.mirror.apply([stored(range(held), tokens(held))])
        while rank.next_record() is not None:
            pass
    assert (blocks(0), blocks(1)) == (3.0, 5.0)
