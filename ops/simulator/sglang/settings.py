"""What can be set of a simulated SGLang engine; names are SGLang's where it has one."""

from ops.simulator.settings import ServerSettings, at_least
from ops.simulator.sglang.dialect import Format, dialect_of
from ops.simulator.sglang.host import WritePolicy
from schemas.errors import ConfigError


class SglangSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated SGLang engine of one or more data-parallel ranks."""

    version: str = "0.5.23"  # of SGLang
    page_size: int = 16  # tokens; SGLang's own default is 1
    pages: int = 1024  # of each rank's device
    host_pages: int = 0  # of each rank's host tier (HiCache); 0: none
    write_policy: WritePolicy = "write_through"
    max_running_requests: int = 128
    chunked_prefill_size: int = 8192  # tokens of prompts in one step
    context_length: int = 0  # tokens; 0: as many as the pages hold
    eagle: bool = False  # pages are of token pairs, as with speculative decoding by EAGLE
    event_format: Format = "default"  # of --kv-events-config, 0.5.22 and newer

    @property
    def longest(self) -> int:
        """Return the tokens that a request may have, its completion included."""
        return self.context_length or self.pages * self.page_size

    def check(self) -> None:
        """Raise ConfigError, naming the setting, where a value cannot be used."""
        dialect_of(self.version, self.event_format)
        for field in ("page_size", "max_running_requests"):
            at_least(field, getattr(self, field), 1)
        at_least("pages", self.pages, 3)
        at_least("host_pages", self.host_pages, 0)
        at_least("chunked_prefill_size", self.chunked_prefill_size, self.page_size)
        at_least("context_length", self.context_length, 0)
        if self.context_length > self.pages * self.page_size:
            raise ConfigError(f"context_length: {self.context_length} tokens do not fit into {self.pages} pages")
        super().check()
