"""vLLM messages in both encodings, and a table of payloads with what they must decode to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relays.engine_events import Cleared, EngineEvent, MediaKey, Removed, Stored
from relays.vllm import Source
from schemas.profiles import Group
from tests.support.payloads import TIME_S, TOP, array_stored, batch, expected, map_removed, pack

BYTES_A, BYTES_B = bytes(24) + b"\0\0\0\0\0\0\0\x0b", bytes(24) + b"\xff" * 8


def map_stored(**fields: object) -> dict[str, object]:
    """Return a store as the 0.32 engine sends it for a plain model, with fields changed or (None) as they are."""
    plain: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [11],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**plain, **fields}


@dataclass(frozen=True)
class Case:
    """A payload and what it says."""

    name: str
    value: object
    events: Sequence[EngineEvent]
    source: Source = field(default_factory=Source)

    @property
    def payload(self) -> bytes:
        """Return the payload's bytes."""
        return pack(self.value)


WHOLE_HASHES = Source(hash_bits=256)
ONE_GROUP = Source(multiple_groups=False)
NAMES = Source(adapters={"7": "alpha"})
BARE_PICTURES = Source(media_places=False)
FULL_SPEC: Mapping[str, object] = {"kv_cache_spec_kind": "full_attention"}

CASES = [
    Case("0.11 array, six fields", batch(array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU")), [expected()]),
    Case("0.11 array without medium", batch(array_stored([11], None, [1, 2, 3, 4], 4, None)), [expected()]),
    Case(
        "0.14 array with lora_name",
        batch(array_stored([11], 10, [1, 2, 3, 4], 4, 7, "GPU", "alpha")),
        [expected(parent=10, adapter="alpha")],
    ),
    Case(
        "0.17 array with extra_keys",
        batch(array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU", None, [["salt"]])),
        [expected(salt="salt")],
    ),
    Case(
        "0.17 array with a bare picture behind a salted block",
        batch(
            array_stored(
                [11, 12], None, [1, 2, 3, 4, 9, 9, 9, 9], 4, 7, "GPU", "alpha", [["alpha", "salt"], ["alpha", "img"]]
            )
        ),
        [
            expected(adapter="alpha", salt="salt"),
            Stored(hashes=(12,), block_size=4, namespace_known=False),
        ],
        BARE_PICTURES,
    ),
    Case(
        "0.17 array with picture and salt in a prompt's first block",
        batch(array_stored([11], None, [1, 9, 9, 9], 4, None, "GPU", None, [["img", "salt"]])),
        [Stored(hashes=(11,), block_size=4, namespace_known=False)],
        BARE_PICTURES,
    ),
    Case(
        "0.17 array with a salt alone",
        batch(array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU", None, [["salt"]])),
        [expected(salt="salt")],
        BARE_PICTURES,
    ),
    Case(
        "0.20 array with group_idx",
        batch(array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU", None, [None], 1)),
        [expected(group=1)],
    ),
    Case(
        "0.22 array with kind and window",
        batch(array_stored([11], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 1, "sliding_window", 8)),
        [expected(group=1, group_spec=Group(1, "window", 4, 8))],
    ),
    Case(
        "array removal and clear",
        batch(["BlockRemoved", [11, 12], "CPU"], ["AllBlocksCleared"]),
        [
            Removed(hashes=(11, 12), tier="host"),
            Cleared(),
        ],
    ),
    Case(
        "0.20 array removal with group_idx", batch(["BlockRemoved", [11], "GPU", 2]), [Removed(hashes=(11,), group=2)]
    ),
    Case("0.24 map", batch(map_stored(**FULL_SPEC)), [expected(group_spec=Group(0, "full", 4))]),
    Case(
        "0.32 map with every field",
        batch(
            map_stored(
                parent_block_hash=10,
                lora_id=7,
                lora_name="alpha",
                extra_keys=[["alpha"]],
                group_idx=2,
                kv_cache_spec_kind="sliding_window_mla",
                kv_cache_spec_sliding_window=96,
                locality="LOCAL",
                ownership="disk0",
                session_id="s",
            )
        ),
        [expected(parent=10, adapter="alpha", group=2, group_spec=Group(2, "window", 4, 96))],
    ),
    Case(
        "map removal and clear",
        batch(map_removed(group_idx=1), {"type": "AllBlocksCleared"}),
        [
            Removed(hashes=(11,), group=1),
            Cleared(),
        ],
    ),
    Case("both encodings in one batch", batch(array_stored(), map_removed()), [expected(), Removed(hashes=(11,))]),
    Case("a map around the events", {"ts": TIME_S, "events": [map_stored()], "data_parallel_rank": 0}, [expected()]),
    Case("no events", batch(), []),
    Case(
        "a signed hash",
        batch(array_stored([-5], -6), map_removed(block_hashes=[-5])),
        [
            expected(hashes=(TOP,), parent=TOP - 1),
            Removed(hashes=(TOP,)),
        ],
    ),
    Case("an unsigned hash", batch(array_stored([TOP])), [expected(hashes=(TOP,))]),
    Case("bytes beside integers", batch(array_stored([BYTES_A], BYTES_B)), [expected(parent=(1 << 64) - 1)]),
    Case(
        "bytes kept whole",
        batch(array_stored([BYTES_A], BYTES_B)),
        [expected(hashes=(BYTES_A,), parent=BYTES_B)],
        WHOLE_HASHES,
    ),
    Case(
        "hashes only",
        batch(map_stored(token_ids=[], block_size=0, medium="CPU")),
        [
            Stored(hashes=(11,), tier="host", names_chunks=True),
        ],
    ),
    Case(
        "an adapter by its id",
        batch(array_stored([11], None, [1, 2, 3, 4], 4, 7, "GPU"), array_stored([11], None, [1, 2, 3, 4], 4, 8, "GPU")),
        [expected(adapter="alpha"), expected(namespace_known=False)],
        NAMES,
    ),
    Case("groups before 0.20 mean nothing", batch(map_stored(group_idx=3)), [expected()], ONE_GROUP),
    Case(
        "adapter, image, salt and embedding in one block",
        batch(
            map_stored(
                lora_name="alpha", lora_id=7, extra_keys=[["alpha", ["img", -2], ["img", 3], "salt", b"\xab\xcd"]]
            )
        ),
        [
            expected(
                adapter="alpha",
                salt="salt",
                media=((MediaKey("img", -2), MediaKey("img", 3), MediaKey("embeds:abcd", 0)),),
            )
        ],
    ),
    Case(
        "media in one block of two",
        batch(map_stored(block_hashes=[11, 12], token_ids=[1] * 8, extra_keys=[None, [["img", 0]]])),
        [expected(hashes=(11, 12), tokens=[1] * 8, media=((), (MediaKey("img", 0),)))],
    ),
    Case("a masked store", batch(map_stored(token_ids=[1] * 12)), [expected(tokens=[1] * 12)]),
    Case("a masked store without hashes", batch(map_stored(block_hashes=[])), [expected(hashes=())]),
    Case(
        "the largest token",
        batch(array_stored([11], None, [0, 0, 0, (1 << 32) - 1])),
        [
            expected(tokens=[0, 0, 0, (1 << 32) - 1]),
        ],
    ),
]
