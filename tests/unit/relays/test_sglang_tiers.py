"""SGLang's messages through decoder and mirror: tiers, copies, order, clears and ranks."""

from ops.replay.pipeline import InProcess
from relays.dialects import EngineSettings, sglang_profile
from tests.support.payloads import array_stored
from tests.support.sglang_engine import CLEARED, HOST, PROMPT, Told, removed, stored
from tests.support.sglang_frames import recorded_messages


async def test_a_demoted_page_is_still_reused_from_the_host() -> None:
    """Write-through: device, then host, then the device copy goes: the page is never gone, it is slower."""
    engine = Told()
    await engine.say(stored(1, 2))
    await engine.say(stored(1, 2, **HOST))
    assert (await engine.ask()).by_tier == {"gpu": 8}
    await engine.say(removed(2))
    assert (await engine.ask()).by_tier == {"gpu": 4, "host": 4}
    await engine.say(removed(2, **HOST))
    assert (await engine.ask()).by_tier == {"gpu": 4}
    assert engine.doubts == {}


async def test_a_write_back_stores_before_it_removes() -> None:
    """Host store and device removal of one batch are one change: nothing was gone between."""
    engine = Told()
    await engine.say(stored(1, 2, 3))
    await engine.say(stored(3, **HOST), removed(3))
    assert (await engine.ask()).by_tier == {"gpu": 8, "host": 4}
    await engine.say(stored(3))  # loaded back; the host copy stays
    assert (await engine.ask()).by_tier == {"gpu": 12}
    await engine.say(removed(3, **HOST))
    assert (await engine.ask()).by_tier == {"gpu": 12}


async def test_tiers_alternate_along_a_run() -> None:
    """A device page behind host ones counts: the match goes on while a page is in either tier."""
    engine = Told()
    await engine.say(stored(1, 2, 3, 4))
    await engine.say(stored(2, **HOST), removed(2))
    assert (await engine.ask()).by_tier == {"gpu": 12, "host": 4}


async def test_a_hole_ends_the_run() -> None:
    """A page in no tier ends what is reused, whatever stands below it."""
    engine = Told()
    await engine.say(stored(1, 2, 3))
    await engine.say(removed(2))
    assert (await engine.ask()).tokens == 4


async def test_a_copy_stored_and_removed_in_one_batch_ends_as_told() -> None:
    """Events of a batch are applied in order: gone where the removal is last, there where the store is."""
    engine = Told()
    await engine.say(stored(1), removed(1), stored(1))
    assert (await engine.ask()).tokens == 4
    await engine.say(removed(1), stored(1), removed(1))
    assert (await engine.ask()).tokens == 0
    assert engine.doubts == {}


async def test_a_page_stored_twice_needs_two_removals() -> None:
    """Two namespaces of one event hash (an extra key) are two copies of it, each with its own removal."""
    engine = Told()
    for _ in range(2):
        await engine.say(stored(1))
    await engine.say(removed(1))
    assert (await engine.ask()).tokens == 4
    await engine.say(removed(1))
    assert (await engine.ask()).tokens == 0


async def test_a_host_page_without_a_device_copy_is_placed() -> None:
    """A prefetch from storage tells host pages that the device never held, with their tokens."""
    engine = Told()
    await engine.say(stored(1, 2, 3, **HOST))
    assert (await engine.ask()).by_tier == {"host": 12}


async def test_a_store_below_an_unknown_page_waits_for_it() -> None:
    """What is told before its parent earns nothing until the parent is told, by either tier."""
    engine = Told()
    await engine.say(stored(2, 3))
    assert (await engine.ask()).tokens == 0
    await engine.say(stored(1, **HOST))
    assert (await engine.ask()).by_tier == {"gpu": 8, "host": 4}


async def test_other_media_are_counted_and_never_the_device() -> None:
    """DISK and EXTERNAL are defined and emitted by no tree; a medium that nobody knows is `other`."""
    engine = Told()
    await engine.say(stored(1, medium="DISK"), stored(2, medium="EXTERNAL"), stored(3, medium="VRAM?"))
    assert (await engine.ask()).by_tier == {"disk": 4, "pool": 4, "other": 4}


async def test_a_clear_empties_device_and_host() -> None:
    """AllBlocksCleared takes both tiers, and what is stored after it in the batch stays."""
    engine = Told()
    await engine.say(stored(1, 2), stored(1, 2, **HOST))
    await engine.say(CLEARED, stored(1))
    assert (await engine.ask()).by_tier == {"gpu": 4}
    await engine.say(["AllBlocksCleared"])
    assert (await engine.ask()).tokens == 0


async def test_a_removal_of_another_tier_leaves_the_page() -> None:
    """Each tier has copies of its own; a removal that finds none is counted."""
    engine = Told()
    await engine.say(stored(1))
    await engine.say(removed(1, **HOST))
    assert (await engine.ask()).tokens == 4
    assert engine.doubts == {"removal_unknown": 1}


async def test_an_uncertain_tier_is_the_slower_one_and_says_so() -> None:
    """HiCache of 0.5.10 demotes in silence and calls a host eviction a device removal."""
    engine = Told("0.5.10.post1", hicache=True)
    await engine.say(array_stored([10], None, PROMPT[:4], 4, None, "GPU"))
    reach = await engine.ask()
    assert reach.by_tier == {"host": 4}
    assert "tier_uncertain" in reach.marks
    await engine.say(["BlockRemoved", [10], "GPU"])
    assert (await engine.ask()).tokens == 0


async def test_a_batch_of_another_rank_is_refused() -> None:
    """Each data-parallel rank has its own socket; a batch that names another rank is counted and not applied."""
    engine = Told(rank=1)
    await engine.say(stored(1), rank=0)
    assert (await engine.ask()).tokens == 0
    assert engine.index.engine.counts["rank_mismatch"] == 1
    await engine.say(stored(1))
    assert (await engine.ask()).tokens == 4


async def test_recorded_batches_of_rank_1_are_rank_1s() -> None:
    """A recorded publisher of rank 1 is read on rank 1's subscription and refused on rank 0's."""
    (message,) = (m for m in recorded_messages() if m.name == "0.5.23 rank 1")
    engines = [InProcess(sglang_profile("m", "r", message.version, EngineSettings()), rank) for rank in (0, 1)]
    for engine in engines:
        await engine.take(message.sequence, message.payload)
    assert [engine.engine.mirror.blocks for engine in engines] == [0, 8]
