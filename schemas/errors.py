"""The error tree; its branches say who acts.

PipelineError
├─ BadInput      refuse: count, skip or answer 4xx; never retry
│  ├─ FrameError     an engine's message, or a record, that cannot be read
│  ├─ BadRequest     a caller's request that cannot be answered
│  └─ ProfileError   facts about an engine that contradict each other or its events
├─ Unavailable   wait: retry with backoff, then report not ready
│  ├─ StoreUnavailable
│  └─ BrokerUnavailable
├─ Stale         degrade: answer `unknown`
│  └─ StaleIndex     the store lost its data (no incarnation key)
└─ ConfigError   stop: one line on stderr, exit 2
"""


class PipelineError(Exception):
    """The root of everything that kvatlas raises on purpose."""


class BadInput(PipelineError):
    """Input that can never become right; it is refused, counted and skipped."""


class FrameError(BadInput):
    """A message that cannot be read as what it claims to be; `reason` is the metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class BadRequest(BadInput):
    """A request whose fields cannot be answered; the message names field and value."""


class ProfileError(BadInput):
    """Facts about an engine that do not fit together."""


class Unavailable(PipelineError):
    """A service that is away for now; the caller retries with a growing pause."""


class StoreUnavailable(Unavailable):
    """Redis did not answer."""


class BrokerUnavailable(Unavailable):
    """Kafka did not answer."""


class Stale(PipelineError):
    """An answer that would be wrong; the caller says `unknown` instead."""


class StaleIndex(Stale):
    """The store has no incarnation key: it was flushed, or never set up."""


class ConfigError(PipelineError):
    """A setting that cannot be used; the process stops with exit code 2."""
