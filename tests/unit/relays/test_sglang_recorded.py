"""The SGLang decoder on messages of real publishers (tests/data/sglang)."""

import pytest

from relays.engine_events import Cleared, EngineEvent, Removed, Stored
from relays.sglang import Source, decode_payload
from relays.sockets import END_MARK, unframe_replay
from schemas.errors import FrameError
from tests.support.sglang_frames import Message, recorded_messages, recorded_replays


def told(event: EngineEvent) -> str:
    """Return an event in few words: sign, tier, pages, and of a store its page size, start and namespace."""
    match event:
        case Stored():
            start = "root" if event.parent is None else "below"
            names = [name for name in (event.salt, event.adapter) if name is not None]
            words = [f"+{event.tier}", f"{len(event.hashes)}x{event.block_size}", start, *names]
            return " ".join([*words, "pairs"] if event.pairs else words)
        case Removed():
            return f"-{event.tier} {len(event.hashes)}"
        case Cleared():
            return "cleared"
    raise AssertionError(event)


RECORDED: dict[str, list[str]] = {
    "0.5.10 clear at the start": ["cleared"],
    "0.5.10 one store a page": ["+gpu 1x16 root", "+gpu 1x16 below"],
    "0.5.10 a store below a parent": ["+gpu 1x16 below"],
    "0.5.10 one removal a page": ["-gpu 1", "-gpu 1"],
    "0.5.10 pages of one token": ["+gpu 1x1 below"] * 17,
    "0.5.10 pairs": ["+gpu 1x16 below pairs"] * 2,
    "0.5.18 a chain in one store": ["+gpu 2x16 root"],
    "0.5.18 removals of two nodes joined": ["-gpu 2"],
    "0.5.18 a salted store": ["+gpu 4x16 root tenant-a"],
    "0.5.18 removals of two namespaces joined": ["-gpu 8"],
    "0.5.18 pages of one token": ["+gpu 17x1 below"],
    "0.5.18 pairs": ["+gpu 1x16 below pairs"],
    "0.5.23 clear at the start": ["cleared"],
    "0.5.23 a store below a parent": ["+gpu 1x16 below"],
    "0.5.23 removal before the store that caused it": ["-gpu 2", "+gpu 1x16 below"],
    "0.5.23 pages of one token": ["+gpu 12x1 below"],
    "0.5.23 pairs": ["+gpu 1x16 below pairs"],
    "0.5.23 write-through: device, then host": ["+gpu 1x16 below", "+host 1x16 below"],
    "0.5.23 write-through: device eviction, then load-back": ["-gpu 2", "+gpu 2x16 below"],
    "0.5.23 write-through: a batch with a host eviction": ["-host 18"],
    "0.5.23 write-back: demotion": ["+host 2x16 below", "-gpu 2", "+gpu 1x16 below"],
    "0.5.23 write-back: a copy stored and removed in one batch": [
        "-host 2", "+host 2x16 below", "-gpu 2", "-host 3", "+host 2x16 below", "-gpu 2", "-host 4",
        "+host 3x16 below", "-gpu 3", "+host 1x16 below", "-gpu 1", "-host 2", "+host 3x16 below", "-gpu 3",
    ],
    "0.5.23 a prefetch from storage": ["+host 20x16 root"],
    "0.5.23 salt and adapter": ["+gpu 4x16 root tenant-a sql-adapter"],
    "0.5.23 an extra key, default format": ["+gpu 4x16 root"],
    "0.5.23 an extra key, dynamo format": ["+gpu 4x16 root"],
    "0.5.23 wide image tokens": ["+gpu 6x16 root"],
    "0.5.23 a session": ["+gpu 4x16 root"],
    "0.5.23 rank 1": ["+gpu 8x16 root"],
    "0.5.23 a state model": ["+gpu 32x1 below"],
    "0.5.23 a window model": ["+gpu 32x1 below"],
}  # fmt: skip


@pytest.mark.parametrize("message", recorded_messages(), ids=lambda message: message.name)
def test_a_recorded_message_says_what_the_table_says(message: Message) -> None:
    """Messages of real publishers decode whole, with the rank in the batch, and without a refusal."""
    whole = decode_payload(message.sequence, message.payload, Source())
    assert whole.rejects == ()
    assert [told(event) for event in whole.events] == RECORDED[message.name]
    assert whole.rank == int("rank1" in message.capture)


@pytest.mark.parametrize("message", recorded_messages(), ids=lambda message: message.name)
def test_a_recorded_message_cut_off_is_refused_whole(message: Message) -> None:
    """No prefix of a recorded payload is a batch."""
    for end in range(len(message.payload)):
        with pytest.raises(FrameError):
            decode_payload(0, message.payload[:end], Source())


def test_recorded_pages_of_0_5_10_chain_by_their_names() -> None:
    """One event a page: each names the page before it as its parent."""
    (message,) = (m for m in recorded_messages() if m.name == "0.5.10 pages of one token")
    events = decode_payload(0, message.payload, Source()).events
    names = [event.hashes[0] for event in events if isinstance(event, Stored)]
    assert [event.parent for event in events[1:] if isinstance(event, Stored)] == names[:-1]


def test_recorded_image_tokens_do_not_fit_32_bits() -> None:
    """0.5.23 marks an image by tokens of 62 bits, which are kept whole."""
    (message,) = (m for m in recorded_messages() if m.name == "0.5.23 wide image tokens")
    (event,) = decode_payload(0, message.payload, Source()).events
    assert isinstance(event, Stored)
    assert max(event.tokens) > 1 << 32


def test_recorded_replays_are_framed_as_their_version_does() -> None:
    """Both framings, and their end marks, are read by the relay's socket; the topic came with 0.5.22."""
    for version, parts in (("0.5.18", 3), ("0.5.23", 4)):
        *replies, end = recorded_replays(version)
        assert {len(reply) for reply in replies} == {parts}
        numbers = [unframe_replay(reply)[0] for reply in replies]
        assert numbers == sorted(numbers)
        assert unframe_replay(end) == (END_MARK, b"")
