"""What can be set of a simulated Mooncake master; names are Mooncake's where it has one."""

import msgspec

from ops.simulator.settings import at_least, check_ports
from schemas.errors import ConfigError


class MasterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated Mooncake master, and the memory that it gives away.

    Defaults are those of mooncake-store/include/types.h.
    """

    name: str = "store"  # in logs and events
    objects: int = 65_536  # that fit; each is one block of a model on one rank
    default_kv_lease_ttl: int = 5000  # ms in which an object that was looked up is not evicted
    eviction_high_watermark_ratio: float = 0.95
    eviction_ratio: float = 0.05  # of the objects, evicted at a time
    host: str = "127.0.0.1"  # that both ports are bound on
    rpc_port: int = 50_051
    events_port: int = 5560

    def check(self) -> None:
        """Raise ConfigError, naming the setting, where a value cannot be used."""
        at_least("objects", self.objects, 1)
        at_least("default_kv_lease_ttl", self.default_kv_lease_ttl, 0)
        for field in ("eviction_high_watermark_ratio", "eviction_ratio"):
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError(f"{field}: {getattr(self, field)} is not above 0 and at most 1")
        check_ports({"rpc_port": [self.rpc_port], "events_port": [self.events_port]})
