"""Which decoder reads which dialect; the dialect comes from configuration, never from guessing by tag."""

from collections.abc import Callable

from relays import sglang, trtllm, vllm
from relays.dialects import has_groups, places_media
from relays.engine_events import Decoded
from schemas.errors import ConfigError
from schemas.profiles import Profile

Decode = Callable[[int, bytes], Decoded]
"""Return what the message with this sequence and payload says; raises FrameError where it is none."""


def decoder_of(profile: Profile) -> Decode:
    """Return the decoder of the profile's dialect.

    Raises:
        ConfigError: no decoder reads it.
    """
    match profile.dialect:
        case "vllm":
            of_vllm = vllm.Source(
                hash_bits=profile.hash.bits,
                adapters=profile.adapters,
                multiple_groups=has_groups(profile.version),
                media_places=places_media(profile.version),
                lmcache=profile.lmcache,
                lmcache_chunk=profile.tier("host").chunk * profile.unit,
            )
            return lambda sequence, payload: vllm.decode_payload(sequence, payload, of_vllm)
        case "dynamo":
            of_dynamo = vllm.Source(multiple_groups=False, consolidated=True)
            return lambda sequence, payload: vllm.decode_payload(sequence, payload, of_dynamo)
        case "sglang":
            of_sglang = sglang.Source(gpu_tier="host" if "tier_uncertain" in profile.marks else "gpu")
            return lambda sequence, payload: sglang.decode_payload(sequence, payload, of_sglang)
        case "trtllm" | "trtllm_zmq":
            of_trtllm = trtllm.Source(
                block_size=profile.unit, adapters=profile.adapters, check_hashes=not profile.hidden_namespaces
            )
            read = trtllm.decode_event if profile.dialect == "trtllm" else trtllm.decode_payload
            return lambda sequence, payload: read(sequence, payload, of_trtllm)
    raise ConfigError(f"dialect: {profile.dialect!r} has no decoder")
