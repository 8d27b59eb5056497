"""What is known of each engine and version, so that an operator sets only what cannot be known."""

import re
from math import gcd
from typing import Annotated, Any, Literal

import msgspec

from relays.lmcache_mp import lmcache_profile
from schemas.errors import ConfigError
from schemas.profiles import MAX_SIZE, Group, HashScheme, PoolUse, Profile, Size, TierProfile

Connector = Literal["none", "offloading", "simple_cpu"]
"""What moves vLLM's blocks to host memory; it decides what a clear means (engines/vllm-events.md 4.5)."""

TRTLLM_BLOCK_SIZE = 32
"""`tokens_per_block` of TensorRT-LLM's KvCacheConfig, which its JSON does not say."""

_SGLANG_LEAST_LOAD = 10  # tokens that HiCache loads back at the least, 0.5.6 to 0.5.23
_MAX_SHARDS = 64

SizeOrNone = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]

DEFAULT_SEED = "vllm-none-hash"
"""Seed of vLLM's block hashes where PYTHONHASHSEED is unset, 0.29 and newer (v1/core/kv_cache_utils.py)."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may say of an engine; every field has a default that fits a plain deployment."""

    block_size: SizeOrNone = 0  # tokens; 0: learnt from its events
    groups: tuple[Group, ...] = ()  # empty: learnt from its events (vLLM 0.22 and newer)
    prefix_match_unit: SizeOrNone = 0  # vLLM 0.26 and newer: partial blocks
    drafting: Literal["none", "eagle"] = "none"
    connector: Connector = "none"
    host_chunks: int | None = None  # capacity of the host tier
    blocks_per_chunk: Size = 1  # of the host tier
    hash_algorithm: str = "sha256"
    hash_seed: str | None = None  # PYTHONHASHSEED of the engine
    hash_bits: int = 64  # 256 with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
    hicache: bool = False  # SGLang keeps a host tier
    unreported: tuple[Literal["window", "state"], ...] = ()  # SGLang: classes of the model that its events leave out
    upper_bound_policy: Literal["credit", "gone"] = "credit"  # of replicas that do not report every class
    report_mode_full: bool = False  # clients send kv_cache_report_mode=full
    lmcache: Literal["none", "in_process", "mp"] = "none"  # vLLM: LMCache inside the engine, or a server beside it
    lmcache_chunk: Size = 256  # tokens
    max_age_s: float = 3600.0  # of copies that nothing ever removes
    pools: tuple[PoolUse, ...] = ()  # that this replica reads
    adapters: dict[str, str] = {}  # lora id -> name, for versions that send only the id
    placeholders: tuple[int, ...] = ()  # tokens that stand for media: vLLM up to 0.16 does not name the picture
    transport: Literal["http", "zmq"] = "http"  # TensorRT-LLM: drained over HTTP, or published by its V2 manager
    windows: tuple[int, ...] = ()  # TensorRT-LLM: attention windows in tokens; learnt from its events
    cascade: bool = True  # TensorRT-LLM over HTTP: a removal names the topmost block only; True errs to the cold side
    check_hashes: bool = True  # TensorRT-LLM: recompute its block names, which show adapters and salts
    rank_selectable: bool = True


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator says of a store that names blocks by engine hash; its events say none of it."""

    block_size: int  # tokens of the replicas' blocks
    blocks_per_chunk: int = 1  # that one name stands for: llm-d's file, or a Mooncake object
    # Mooncake: a block has an object by tensor-parallel rank, at most one a KV head, and all are needed
    tp_size: int = 1
    pcp_size: int = 1  # and by rank of prefill context, decode context and pipeline parallelism
    dcp_size: int = 1
    pp_size: int = 1
    key_pattern: str = ""  # Mooncake; empty: vLLM's store connector's
    hash_algorithm: str = "sha256"
    hash_seed: str | None = DEFAULT_SEED  # of the engines that write it
    max_age_s: float = 3600.0  # of what may have gone without an event
    models: dict[str, str] = {}  # the store's name of a model -> ours; a name that is not here is ours already


def pool_profile(kind: str, model: str, name: str, settings: PoolSettings) -> Profile:
    """Return the profile of one model's part of a pool.

    llm-d's files are loaded by vLLM's OffloadingConnector, which continues where the device ends, in whole files, and
    may load a prompt's last token. Mooncake's store connector looks a prompt up from its start; where all of it is
    there, it looks again below the last token (earlier releases left out that token alone: a block more than is said).

    Source: engines/other-engines.md 4.1 (Mooncake) and 7.2 (llm-d); vLLM distributed/kv_transfer/kv_connector/v1/
    mooncake/store/scheduler.py (get_num_new_matched_tokens), store/worker.py (lookup), offloading/scheduler.py;
    llm-d-kv-cache llmd_fs_backend/spec.py.
    """
    if kind == "lmcache":
        return lmcache_profile(model, name, settings.block_size)
    if kind not in ("mooncake", "llmd"):
        raise ConfigError(f"pool: {kind!r} is not known; known: llmd, lmcache, mooncake")
    if min(settings.block_size, settings.blocks_per_chunk) < 1 or settings.max_age_s <= 0:
        raise ConfigError("pool: block_size and blocks_per_chunk are at least 1, max_age_s is above 0")
    shards = settings.tp_size * settings.pcp_size * settings.dcp_size * settings.pp_size
    if not 1 <= shards <= _MAX_SHARDS:
        raise ConfigError(
            f"pool: tp_size, pcp_size, dcp_size and pp_size give {shards} objects a block, 1 to 64 may be"
        )
    return Profile(
        model=model,
        name=name,
        engine=kind,
        version="",
        dialect=kind,
        unit=settings.block_size,
        alignment=settings.block_size,
        # the shards of a block are groups of one class: all must have it
        groups=tuple(Group(shard, "full", settings.block_size) for shard in range(shards)),
        tiers=tuple(
            TierProfile(tier, chunk=settings.blocks_per_chunk, last_token="counted" if kind == "llmd" else "never")
            for tier in ("host", "disk")
        ),
        tier_walk="mixed",
        removal="one_for_all_tiers",
        hash_only_stores=True,
        lookup_from_start=kind == "mooncake",
        replay="none",
        hash=HashScheme(settings.hash_algorithm, settings.hash_seed, 64),
        max_age_s=settings.max_age_s,
    )


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, suffixes dropped: `0.5.10.post1` is (0, 5, 10)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if not match:
        raise ConfigError(f"engine version: {text!r} does not begin with a number")
    return tuple(int(part) for part in match.group().split("."))


def profile_for(engine: str, model: str, name: str, version: str, settings: EngineSettings) -> Profile:
    """Return the profile that an engine, its version and its operator's settings give.

    Raises:
        ConfigError: an engine that is not known here, a version that cannot be used, or settings that it cannot have.
    """
    match engine:
        case "vllm":
            return vllm_profile(model, name, version, settings)
        case "sglang":
            return sglang_profile(model, name, version, settings)
        case "trtllm":
            return trtllm_profile(model, name, version, settings)
        case "dynamo":
            return dynamo_profile(model, name, version, settings)
    raise ConfigError(f"engine: {engine!r} is not known; known: dynamo, sglang, trtllm, vllm")


def vllm_profile(model: str, name: str, version: str, settings: EngineSettings) -> Profile:
    """Return the profile of a vLLM replica.

    Source: engines/vllm-events.md, sections 1.3 (fields), 2 (hashes), 4 (quirks) and 5 (versions).
    """
    number = parse_version(version)
    if number < (0, 11):
        raise ConfigError(f"engine version: vLLM {version} is older than 0.11, whose events are not known here")
    if settings.connector == "simple_cpu" and number < (0, 30):
        raise ConfigError(
            f"connector: SimpleCPUOffloadConnector of vLLM {version} announces host evictions as device removals"
        )
    groups = settings.groups
    if number < (0, 20) and len(groups) != 1:
        # events switch the hybrid cache manager off, so there is one group that behaves as full attention (4.8)
        groups = (Group(0, "full", settings.block_size),) if settings.block_size else ()
    unit, alignment = _vllm_unit(number, groups, settings)
    return Profile(
        model=model,
        name=name,
        engine="vllm",
        version=version,
        dialect="vllm",
        unit=unit,
        alignment=alignment,
        drafting=_vllm_drafting(number, settings),
        groups=groups,
        tiers=(TierProfile("gpu"), _vllm_host(number, settings), TierProfile("disk", removals=False)),
        lmcache=settings.lmcache,
        lookup_from_start=settings.lmcache == "in_process",
        max_age_s=settings.max_age_s,
        tier_walk="device_then_lower",
        re_announces_hits=settings.report_mode_full,
        hash_only_stores=settings.connector != "none",
        clear_scope="device_then_host" if settings.connector == "simple_cpu" else "device",
        hash=_vllm_hash(number, settings),
        adapters=settings.adapters,
        placeholders=settings.placeholders,
        hidden_namespaces=_vllm_hidden(number),
        rank_selectable=settings.rank_selectable,
        pools=settings.pools,
    )


def sglang_profile(model: str, name: str, version: str, settings: EngineSettings) -> Profile:
    """Return the profile of an SGLang replica.

    Source: engines/other-engines.md, sections 1.2 to 1.9; mem_cache/hiradix_cache.py (load_back_threshold).
    """
    number = parse_version(version)
    if number < (0, 5, 6):
        # the first page of every tree node says that it has no parent, and hashes ignore what precedes (1.4)
        raise ConfigError(f"engine version: SGLang {version} announces broken parents; 0.5.6 is the first usable one")
    uncertain = settings.hicache and number < (0, 5, 11)  # demotion is silent there (1.8)
    unit = settings.block_size
    groups = (Group(0, "full", unit),) if unit else ()
    return Profile(
        model=model,
        name=name,
        engine="sglang",
        version=version,
        dialect="sglang",
        unit=unit,
        alignment=unit,
        drafting="pairs" if settings.drafting == "eagle" else "none",
        groups=groups,
        tiers=(TierProfile("gpu"), TierProfile("host", least_tokens=_SGLANG_LEAST_LOAD)),
        tier_walk="mixed",
        clear_scope="all",
        hidden_namespaces=_sglang_hidden(number),
        marks=("tier_uncertain",) if uncertain else (),
        rank_selectable=settings.rank_selectable,
        pools=settings.pools,
        upper_bound=bool(settings.unreported),
        upper_bound_policy=settings.upper_bound_policy,
    )


def trtllm_profile(model: str, name: str, version: str, settings: EngineSettings) -> Profile:
    """Return the profile of a TensorRT-LLM replica.

    Over HTTP a block has one level at a time and one removal ends it. Since UnifiedBlockTree (PR #11919, March 2026)
    only the topmost removed block is named; the facts give the change's date and no release, so no version decides.

    Source: engines/other-engines.md, section 2.
    """
    parse_version(version)
    pulled = settings.transport == "http"
    unit = settings.block_size or (TRTLLM_BLOCK_SIZE if pulled else 0)  # ZMQ says it
    windows = tuple(sorted(set(settings.windows), reverse=True)) if pulled else ()
    if any(window < 1 for window in windows):
        raise ConfigError(f"windows: {list(windows)} are no numbers of tokens")
    return Profile(
        model=model,
        name=name,
        engine="trtllm",
        version=version,
        dialect="trtllm" if pulled else "trtllm_zmq",
        unit=unit,
        alignment=unit,
        tiers=(TierProfile("gpu"), TierProfile("host"), TierProfile("disk")),
        tier_walk="mixed",
        removal="one_for_all_tiers" if pulled else "per_copy",
        cascade=settings.cascade and pulled,
        clear_scope="all",
        replay="none" if pulled else "ring",
        adapters=settings.adapters,
        hidden_namespaces=() if settings.check_hashes else ("salt", "adapter"),
        marks=() if settings.check_hashes else ("namespaces_unchecked",),
        rank_selectable=settings.rank_selectable,
        pools=settings.pools,
        window_sizes=windows,
        upper_bound=len(windows) > 1,
        upper_bound_policy=settings.upper_bound_policy,
    )


def dynamo_profile(model: str, name: str, version: str, settings: EngineSettings) -> Profile:
    """Return the profile of a replica that is heard through Dynamo's KVBM consolidator.

    It merges an engine's events with those of its own host and disk tiers: a block is announced by the first tier that
    has it, and removed when the last one lets it go, so in which tier it is now is not known. All ranks are told as
    rank 0, nothing can be asked again, and names are the consolidator's own.

    Source: engines/other-engines.md, section 5.3.
    """
    unit = settings.block_size
    return Profile(
        model=model,
        name=name,
        engine="dynamo",
        version=version,
        dialect="dynamo",
        unit=unit,
        alignment=unit,
        groups=(Group(0, "full", unit),) if unit else (),
        tiers=(TierProfile("gpu"), TierProfile("host"), TierProfile("disk")),
        tier_walk="mixed",
        removal="one_for_all_tiers",
        replay="none",
        hidden_namespaces=("salt", "adapter"),
        marks=("tier_uncertain",),
        rank_selectable=False,
        pools=settings.pools,
        max_age_s=settings.max_age_s,
    )


def _sglang_hidden(number: tuple[int, ...]) -> Any:
    """Return the namespaces that share hashes or are not announced (1.3, 1.4); extra keys never are.

    0.5.22 tells adapters in its `dynamo` format alone, which nothing in an event shows.
    """
    hidden = ["extra_key"]
    if number < (0, 5, 18):
        hidden.append("salt")
    if number < (0, 5, 23):
        hidden.append("adapter")
    return tuple(hidden)


def has_groups(version: str) -> bool:
    """Return whether this vLLM's `group_idx` means anything."""
    return parse_version(version) >= (0, 20)


def places_media(version: str) -> bool:
    """Return whether this vLLM's extra keys say where in a block a picture begins; in 0.19.1, not in 0.18.0."""
    return parse_version(version) >= (0, 19)


def _vllm_unit(number: tuple[int, ...], groups: tuple[Group, ...], settings: EngineSettings) -> tuple[int, int]:
    """Return the unit, and what a hit is a multiple of where that is not the blocks' least common multiple (else 0).

    Hits end inside blocks from 0.26 on, where a recurrent group's blocks are longer than the hash unit and every
    window's are as long. The unit is prefix_match_unit or else what all blocks have in common, so unequal blocks
    alone are enough; a single group has no other unit than its block.

    Source: v1/core/kv_cache_utils.py resolve_kv_cache_block_sizes and partial_hash_hits_enabled (0.32),
    kv_cache_coordinator.py HybridKVCacheCoordinator (0.26 to 0.30).
    """
    if not groups:
        return settings.prefix_match_unit or settings.block_size, settings.prefix_match_unit
    unit = gcd(*(group.block_size for group in groups))
    if len(groups) == 1 or number < (0, 26):
        return unit, 0
    unit = settings.prefix_match_unit or unit
    partial = any(group.kind == "state" and group.block_size > unit for group in groups) and not any(
        group.kind == "window" and group.block_size != unit for group in groups
    )
    return unit, unit if partial else 0


def _vllm_drafting(
    number: tuple[int, ...], settings: EngineSettings
) -> Literal["none", "drop_unit", "drop_unit_ahead"]:
    """Return what EAGLE takes: a block, which from 0.32 on may be the prompt's last where there are several groups."""
    if settings.drafting == "none":
        return "none"
    return "drop_unit_ahead" if number >= (0, 32) else "drop_unit"


def _vllm_host(number: tuple[int, ...], settings: EngineSettings) -> TierProfile:
    """Return the host tier; OffloadingConnector may load the prompt's last token, and counts it from 0.20 on.

    A draft model takes the last chunk that it finds from 0.24 on, and SimpleCPUOffloadConnector's last block always.

    Source: v1/offloading_connector.py 0.14.1, v1/offloading/scheduler.py 0.22.1 to 0.32.0 (is_eagle_unverified),
    v1/simple_kv_offload/manager.py 0.30.0 and 0.32.0 (use_eagle), v1/core/sched/scheduler.py 0.19.1 and 0.20.0
    (PrefillStats), and a live 0.32.0.
    """
    if settings.lmcache == "in_process":
        if not settings.block_size or settings.lmcache_chunk % settings.block_size:
            raise ConfigError(
                f"lmcache_chunk: {settings.lmcache_chunk} tokens are no whole number of blocks of {settings.block_size}"
            )
        # loads whole chunks, all but the last token of a prompt; never removes (engines/other-engines.md 3.1)
        chunk = settings.lmcache_chunk // settings.block_size
        return TierProfile("host", chunk=chunk, removals=False, last_token="uncounted")
    last: Literal["never", "uncounted", "counted"] = "never"
    if settings.connector == "offloading":
        last = "counted" if number >= (0, 20) else "uncounted"
    return TierProfile(
        "host",
        chunk=settings.blocks_per_chunk,
        capacity=settings.host_chunks,
        last_token=last,
        drafting=settings.connector == "simple_cpu" or (settings.connector == "offloading" and number >= (0, 24)),
    )


def _vllm_hash(number: tuple[int, ...], settings: EngineSettings) -> HashScheme:
    seed = settings.hash_seed
    if seed is None and number >= (0, 29) and settings.hash_algorithm in ("sha256", "sha256_cbor"):
        seed = DEFAULT_SEED
    return HashScheme(settings.hash_algorithm, seed, settings.hash_bits)


def _vllm_hidden(number: tuple[int, ...]) -> Any:
    if number < (0, 17):
        return ("salt",)
    return ("adapter_path",) if number >= (0, 31) else ()
