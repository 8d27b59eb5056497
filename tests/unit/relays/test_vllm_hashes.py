"""vLLM's own hash of a prompt's first block, for versions that hide salts."""

import hashlib
import pickle
from pathlib import Path

import msgspec
import pytest

from ops.replay.capture import load_capture
from relays.dialects import EngineSettings, vllm_profile
from relays.engine_events import MediaKey
from relays.vllm_hashes import FirstBlockCheck, first_block_check
from schemas.profiles import HashScheme
from tests.support.engines import profile, stored

RECORDED = Path(__file__).parents[2] / "data" / "vllm" / "0.14.1-salt-lora"

# NONE_HASH of PYTHONHASHSEED=0: SHA-256 of the pickled, or the CBOR-encoded, string "0"
SHA256_OF_SEED_0 = "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c"
CBOR_OF_SEED_0 = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"


def test_the_first_parent_is_the_hash_of_the_seed() -> None:
    """Seed "0" gives the root that vLLM logs for it, with both algorithms."""
    assert hashlib.sha256(pickle.dumps("0", protocol=5)).hexdigest() == SHA256_OF_SEED_0
    assert hashlib.sha256(b"\x610").hexdigest() == CBOR_OF_SEED_0  # CBOR: text of one byte


def test_a_block_is_hashed_with_root_tokens_and_adapter() -> None:
    """The name of a first block is SHA-256 over the pickled (root, tokens, keys), its low 64 bits big-endian."""
    root = bytes.fromhex(SHA256_OF_SEED_0)
    plain = hashlib.sha256(pickle.dumps((root, (1, 2, 3, 4), None), protocol=5)).digest()
    named = hashlib.sha256(pickle.dumps((root, (1, 2, 3, 4), ("alpha",)), protocol=5)).digest()
    check = FirstBlockCheck("sha256", "0", 64)
    assert check.first_block(stored([1], [1, 2, 3, 4])) == int.from_bytes(plain[-8:], "big")
    assert check.first_block(stored([1], [1, 2, 3, 4], adapter="alpha")) == int.from_bytes(named[-8:], "big")
    assert FirstBlockCheck("sha256", "0", 256).first_block(stored([1], [1, 2, 3, 4])) == plain


def test_cbor_hashes_the_canonical_encoding() -> None:
    """With sha256_cbor the same tuple is hashed as CBOR: array of bytes, array and null."""
    body = b"\x83\x58\x20" + bytes.fromhex(CBOR_OF_SEED_0) + b"\x84\x01\x02\x03\x04" + b"\xf6"
    name = FirstBlockCheck("sha256_cbor", "0", 256).first_block(stored([1], [1, 2, 3, 4]))
    assert name == hashlib.sha256(body).digest()


def test_only_the_first_block_of_a_longer_store_is_hashed() -> None:
    """Tokens behind the first block do not change its name."""
    check = FirstBlockCheck("sha256", "0", 64)
    assert check.first_block(stored([1, 2], [1, 2, 3, 4, 5, 6, 7, 8])) == check.first_block(stored([1], [1, 2, 3, 4]))


def test_what_cannot_be_told_is_not_guessed() -> None:
    """A block with media, or less than a block, has no known name."""
    check = FirstBlockCheck("sha256", "0", 64)
    assert check.first_block(stored([1], [1, 2, 3, 4], media=((MediaKey("img", 0),),))) is None
    assert check.first_block(stored([1], [1, 2, 3])) is None


def test_a_recorded_engine_names_its_first_block_so() -> None:
    """The first block of the 0.14.1 recording has the hash that is computed here from its tokens."""
    capture = load_capture(RECORDED)
    _, hashes, parent, token_ids, size, *_ = msgspec.msgpack.decode(capture.frames[0].parts[2])[1][0]
    assert parent is None
    event = stored(hashes, token_ids, block_size=size)
    assert FirstBlockCheck("sha256", "0", 64).first_block(event) == hashes[0]


def test_there_is_a_check_only_where_salts_are_hidden_and_the_seed_is_known() -> None:
    """Up to 0.16 with a seed there is one; not without it, not where salts are announced, not for other hashes."""
    hidden = vllm_profile("m", "r", "0.14.1", EngineSettings(hash_seed="0"))
    assert first_block_check(hidden) is not None
    assert first_block_check(vllm_profile("m", "r", "0.14.1", EngineSettings())) is None
    assert first_block_check(vllm_profile("m", "r", "0.18.1", EngineSettings(hash_seed="0"))) is None
    assert first_block_check(msgspec.structs.replace(hidden, hash=HashScheme("xxhash", "0"))) is None


@pytest.mark.parametrize("seed", ["0", "1", "vllm-none-hash"])
def test_another_seed_names_every_block_anew(seed: str) -> None:
    """The seed enters every name, so engines with other seeds agree on none."""
    known = first_block_check(profile(hidden_namespaces=("salt",), hash=HashScheme(seed=seed)))
    other = FirstBlockCheck("sha256", "another", 64)
    assert known is not None
    assert known.first_block(stored([1], [1, 2, 3, 4])) != other.first_block(stored([1], [1, 2, 3, 4]))
