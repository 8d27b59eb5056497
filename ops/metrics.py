"""Every metric of every process: `kvatlas_<package>_<thing>_<unit>`; labels are small closed sets."""

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from schemas.errors import ConfigError

RELAY_MESSAGES = Counter(
    "kvatlas_relay_messages_total", "Messages taken from engines, by how they came.", ["engine", "how"]
)
RELAY_REJECTS = Counter(
    "kvatlas_relay_rejects_total",
    "Messages and events that were refused; look at the reason, then at the engine's version.",
    ["engine", "reason"],
)
RELAY_DOUBTS = Counter(
    "kvatlas_relay_doubts_total",
    "What mirrors refused, could not place or had to forget, by reason; mostly counted in blocks, which earn nothing.",
    ["engine", "reason"],
)
RELAY_LIVES = Counter(
    "kvatlas_relay_lives_total", "New lives begun; each one retracts all that was known before.", ["engine", "reason"]
)
RELAY_REPLAYS = Counter("kvatlas_relay_replays_total", "Replays asked of engines, by outcome.", ["engine", "outcome"])
RELAY_POLLS = Counter(
    "kvatlas_relay_polls_total",
    "Polls of engines that must be asked; a failed one may have lost events.",
    ["engine", "outcome"],
)
RELAY_RECORDS = Counter("kvatlas_relay_records_total", "Records acknowledged by Kafka.", ["engine"])
RELAY_PRODUCERS = Counter(
    "kvatlas_relay_producers_total", "Kafka producers that failed and were replaced; the records were sent again."
)
RELAY_BLOCKS = Gauge(
    "kvatlas_relay_blocks", "Engine hashes with copies in a mirror, by whose it is.", ["engine", "model", "holder"]
)

STREAM_RECORDS = Counter("kvatlas_stream_records_total", "Records folded into the index.", ["topic"])
STREAM_BLOCKS = Counter("kvatlas_stream_blocks_total", "Blocks written to the index.", ["topic"])
STREAM_WRITES = Counter("kvatlas_stream_writes_total", "Writes to the index, by what became of them.", ["outcome"])
STREAM_DEAD_LETTERS = Counter(
    "kvatlas_stream_dead_letters_total", "Records that could not be read and were set aside.", ["topic", "reason"]
)
STREAM_LAG = Gauge("kvatlas_stream_lag_records", "Records that wait to be folded.", ["topic", "partition"])
STREAM_RETRIES = Counter("kvatlas_stream_retries_total", "Flushes that had to wait for Redis.")
STREAM_FLUSH = Histogram(
    "kvatlas_stream_flush_seconds",
    "Time of one flush to Redis.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
)
STREAM_RESYNCS = Counter("kvatlas_stream_resyncs_total", "Holders asked to tell everything again.", ["reason"])

ROUTER_REQUESTS = Counter("kvatlas_router_requests_total", "Answers, by route and status.", ["route", "status"])
ROUTER_PRICE = Histogram(
    "kvatlas_router_price_seconds",
    "Time to price a prompt, from its body read to its answer made.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
ROUTER_UNKNOWN = Counter(
    "kvatlas_router_unknown_total", "Replicas answered as unknown; the share of blind answers.", ["reason"]
)
ROUTER_HOLDERS = Gauge("kvatlas_router_holders", "Holders in the last table read, by state.", ["state"])


def serve(port: int, host: str = "127.0.0.1") -> None:
    """Serve the metrics of this process over HTTP; port 0 serves none.

    Raises:
        ConfigError: nothing can listen there.
    """
    if not port:
        return
    try:
        start_http_server(port, addr=host, registry=REGISTRY)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"KVATLAS_METRICS_HOST, KVATLAS_METRICS_PORT: {host}:{port}: {error}") from error
