"""TensorRT-LLM's own block names, and what they show of adapters and salts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from relays.trtllm_hashes import count_named, salt_ids, v1_names, v2_first_digests

SAMPLES = Path(__file__).parents[2] / "data" / "trtllm" / "samples.jsonl"
V1 = "v1_block_key"
A, B, PARTIAL = 1129369155989302, 15923378101821673488, 4926926678720399332  # of the samples

# libstdc++ 12's std::hash<std::string>, printed by a program of five lines
STD_HASHES = {
    "": 6142509188972423790,
    "a": 4993892634952068459,
    "tenant-a": 957734481489835948,
    "tenant-a/1234567": 5994843329557818055,
    "a much longer salt, of 37 characters!": 8871829838571385963,
    "é": 15791941521038362485,  # UTF-8
}


def test_blocks_are_named_as_in_the_samples() -> None:
    """The function gives the three names of the sample chain, the partial block's too."""
    assert list(v1_names(range(100, 108), 4)) == [A, B]
    assert list(v1_names([108, 109], 2, B)) == [PARTIAL]


def test_every_v1_name_of_the_samples_is_the_functions() -> None:
    """Each stored block without another algorithm bears the name that its tokens and its parent give."""
    rows = [json.loads(line) for line in SAMPLES.read_text().splitlines()]
    events = [event for row in rows for event in row.get("body", ())]
    stores: list[Any] = [e["data"] for e in events if e["data"]["type"] == "stored" and "hash_algo" not in e]
    assert len(stores) == 5
    for data in stores:
        parent = data["parent_hash"] or 0
        for block in data["blocks"]:
            ids = [token["token_id"] for token in block["tokens"]]
            (parent,) = v1_names(ids, len(ids), parent)
            assert parent == block["block_hash"]


def test_a_rest_of_less_than_a_block_has_no_name() -> None:
    """Only whole blocks are named; no tokens, no names."""
    assert list(v1_names(range(100, 107), 4)) == [A]
    assert list(v1_names([], 4)) == []


def test_an_adapter_goes_into_every_block() -> None:
    """The same tokens under an adapter have other names from the first block on, and under another one others."""
    plain, first, second = ([*v1_names(range(8), 4, adapter_id=adapter)] for adapter in (None, 1, 2))
    assert len({*plain, *first, *second}) == 6
    (below,) = v1_names(range(4, 8), 4, first[0])
    assert below != first[1]  # the adapter again, not only through the parent


def test_a_salt_goes_into_the_first_block_alone() -> None:
    """A salted root has another name; what is below differs only through its parent."""
    salted = list(v1_names(range(8), 4, salt_id=7))
    assert salted[0] != next(v1_names(range(8), 4))
    assert list(v1_names(range(4, 8), 4, salted[0])) == [salted[1]]
    assert list(v1_names(range(4, 8), 4, salted[0], salt_id=7)) == [salted[1]]


@pytest.mark.parametrize("salt", STD_HASHES)
def test_a_salts_id_is_that_of_either_manager(salt: str) -> None:
    """V2 takes eight bytes of SHA-256, V1 what libstdc++ makes of the text."""
    of_v2, of_v1 = salt_ids(salt)
    assert of_v2 == int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")
    assert of_v1 == STD_HASHES[salt]


# ---- how many blocks bear their names


def test_names_are_counted_up_to_the_first_other_one() -> None:
    """From the first block on whose name the tokens do not give, none counts."""
    names = list(v1_names(range(16), 4))
    assert count_named(names, range(16), 4, None, algorithm=V1) == 4
    assert count_named([*names[:2], 5, names[3]], range(16), 4, None, algorithm=V1) == 2
    assert count_named([5, *names[1:]], range(16), 4, None, algorithm=V1) == 0


def test_a_continued_chain_is_counted_from_its_parent() -> None:
    """The parent's name is what the first block's is made of; another parent gives other names."""
    names = list(v1_names(range(16), 4))
    assert count_named(names[2:], range(8, 16), 4, names[1], algorithm=V1) == 2
    assert count_named(names[2:], range(8, 16), 4, names[0], algorithm=V1) == 0
    assert count_named(names[2:], range(8, 16), 4, None, algorithm=V1) == 0


def test_a_hidden_adapter_or_salt_counts_nothing() -> None:
    """Names that an adapter or a salt went into are not those of the plain tokens."""
    for hidden in ({"adapter_id": 3}, {"salt_id": salt_ids("s")[0]}):
        names = list(v1_names(range(8), 4, **hidden))
        assert count_named(names, range(8), 4, None, algorithm=V1) == 0


@pytest.mark.parametrize("manager", [0, 1])
def test_a_told_salt_is_found_in_either_managers_names(manager: int) -> None:
    """A salt that the event tells is right in V2's way and in V1's, and another salt is not."""
    names = list(v1_names(range(8), 4, salt_id=salt_ids("s")[manager]))
    assert count_named(names, range(8), 4, None, algorithm=V1, salt="s") == 2
    assert count_named(names, range(8), 4, None, algorithm=V1, salt="t") == 0


def digest(parent: bytes, tokens: range, width: int = 4) -> bytes:
    return hashlib.sha256(parent + b"".join(token.to_bytes(width, "little") for token in tokens)).digest()


ROOT = hashlib.sha256(b"\0").digest()  # no field present
FIRST_RELEASES = hashlib.sha256(b"").digest()


@pytest.mark.parametrize(
    ("algorithm", "spell"),
    [
        ("v2_sha256", bytes),
        ("v2_sha256_64", lambda d: int.from_bytes(d[:8], "big")),
        ("v2_sha256_low64", lambda d: int.from_bytes(d[8 * 3 :], "big")),
    ],
)
@pytest.mark.parametrize(("root", "width"), [(ROOT, 4), (ROOT, 8), (FIRST_RELEASES, 8)])
def test_a_v2_chain_is_known_by_its_first_block(algorithm: str, spell: Any, root: bytes, width: int) -> None:
    """SHA-256 of root and tokens, in each spelling and each release's widths; what follows hangs on it."""
    first = spell(digest(root, range(4), width))
    assert count_named([first, 77], range(8), 4, None, algorithm=algorithm) == 2
    assert count_named([78], range(8, 12), 4, 77, algorithm=algorithm) == 1
    assert count_named([77, first], range(8), 4, None, algorithm=algorithm) == 0


def test_a_v2_namespace_has_another_root() -> None:
    """A told adapter is found with its number in the root, behind a mask; not told, the names are others."""
    root = hashlib.sha256(b"\x01" + (9).to_bytes(8, "little")).digest()
    name = int.from_bytes(digest(root, range(4))[:8], "big")
    assert count_named([name], range(4), 4, None, algorithm="v2_sha256_64", adapter_id=9) == 1
    assert count_named([name], range(4), 4, None, algorithm="v2_sha256_64") == 0
    salted = hashlib.sha256(b"\x02" + salt_ids("s")[0].to_bytes(8, "little")).digest()
    assert digest(salted, range(4)) in list(v2_first_digests(range(4), salt_id=salt_ids("s")[0]))


@pytest.mark.parametrize("parent", [None, 5])
def test_names_of_an_unknown_algorithm_count_nothing(parent: int | None) -> None:
    """A release that hashes in a way that nobody here knows earns nothing (doubt is cold)."""
    assert count_named([A], range(100, 104), 4, parent, algorithm="v3_blake3") == 0


def test_a_digest_is_no_v1_name() -> None:
    """Bytes where v1_block_key has integers count nothing, as a name or as a parent."""
    assert count_named([bytes(32)], range(4), 4, None, algorithm=V1) == 0
    assert count_named([A], range(100, 104), 4, bytes(32), algorithm=V1) == 0
