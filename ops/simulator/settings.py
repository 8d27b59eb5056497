"""What can be set of a simulated engine; names are the engine's own where it has one."""

from collections.abc import Mapping, Sequence

import msgspec

from ops.simulator.dialect import dialect_of
from schemas.errors import ConfigError

_MAX_PORT = 65_535


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every simulated engine has, of one or more data-parallel ranks: a name, a speed, ports."""

    name: str = "sim"  # of the replica, in logs
    model: str = "simulated"
    adapters: dict[str, str] = {}  # name of a LoRA adapter -> its path, which vLLM 0.31 and newer hash
    prefill_tokens_per_s: float = 0.0  # of a rank; 0: as fast as possible
    decode_tokens_per_s: float = 0.0  # of each running request; 0: as fast as possible
    host: str = "127.0.0.1"  # that all ports are bound on
    http_port: int = 8000
    events_port: int = 5557  # of the first rank; rank n: + n
    replay_port: int = 5657  # of the first rank; rank n: + n; 0: no replay
    topic: str = ""
    buffer_steps: int = 10_000  # batches that a replay can give again
    rank: int = 0  # of the first rank
    data_parallel_size: int = 1  # ranks behind the HTTP port

    @property
    def ranks(self) -> range:
        """Return the ranks' numbers."""
        return range(self.rank, self.rank + self.data_parallel_size)

    def check(self) -> None:
        """Raise ConfigError, naming the setting, where a value cannot be used."""
        for field in ("buffer_steps", "data_parallel_size"):
            at_least(field, getattr(self, field), 1)
        for field in ("prefill_tokens_per_s", "decode_tokens_per_s", "rank"):
            at_least(field, getattr(self, field), 0)
        if self.model in self.adapters:
            raise ConfigError(f"adapters: {self.model!r} is the model's name")
        self._check_ports()

    def _check_ports(self) -> None:
        ports = {"http_port": [self.http_port], "events_port": [self.events_port + rank for rank in self.ranks]}
        if self.replay_port:
            ports["replay_port"] = [self.replay_port + rank for rank in self.ranks]
        check_ports(ports)


class SimulatorSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated vLLM engine."""

    version: str = "0.32.0"  # of vLLM
    block_size: int = 16  # tokens
    blocks: int = 1024  # of each rank, block 0 included, which vLLM never uses
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192  # of one step
    max_model_len: int = 0  # tokens; 0: as many as the blocks hold
    hash_seed: str | None = None  # PYTHONHASHSEED
    store: str = ""  # address of a simulated Mooncake master that its connector asks; empty: no connector

    @property
    def model_len(self) -> int:
        """Return the tokens that a request may have, its completion included."""
        capacity = (self.blocks - 1) * self.block_size
        return self.max_model_len or capacity

    def check(self) -> None:
        """Raise ConfigError, naming the setting, where a value cannot be used."""
        dialect_of(self.version)
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            at_least(field, getattr(self, field), 1)
        at_least("blocks", self.blocks, 2)
        at_least("max_model_len", self.max_model_len, 0)
        if self.max_model_len > (self.blocks - 1) * self.block_size:
            raise ConfigError(f"max_model_len: {self.max_model_len} tokens do not fit into {self.blocks} blocks")
        if self.store and "://" not in self.store:
            raise ConfigError(f"store: {self.store!r} is no address, for example tcp://127.0.0.1:50051")
        super().check()


def at_least(field: str, value: float, least: int) -> None:
    """Raise ConfigError where a setting is less than that."""
    if value < least:
        raise ConfigError(f"{field}: {value} is less than {least}")


def check_ports(ports: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError where a setting's ports are none, or another setting's too."""
    owners: dict[int, str] = {}
    for field, wanted in ports.items():
        for port in wanted:
            if not 0 < port <= _MAX_PORT:
                raise ConfigError(f"{field}: {port} is no port")
            if port in owners:
                raise ConfigError(f"{field}: {port} is taken by {owners[port]}; leave room for all ranks")
            owners[port] = field
