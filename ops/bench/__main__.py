"""`python -m ops.bench`: measure beside NVIDIA Dynamo's index; the last line is one JSON object."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from ops.bench import dynamo
from ops.bench.run import run
from ops.logs import configure


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the prefix tree")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--event-blocks", type=int, default=16, help="of one engine event")
    parser.add_argument("--merged", type=int, default=8, help="engine events that a busy relay says in one record")
    parser.add_argument("--queries", type=int, default=600, help="prompts of each length")
    parser.add_argument("--window-s", type=float, default=0.5, help="how long each takes its turn under load")
    parser.add_argument("--redis-server", type=Path, help="instead of the Valkey that comes with kvatlas[embedded]")
    parser.add_argument("--no-dynamo", action="store_true", help="measure kvatlas alone; ratios are null")
    arguments = parser.parse_args()
    configure("error", "console", sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.ERROR)  # it warns of leaders that are only just chosen
    missing = "left out by --no-dynamo" if arguments.no_dynamo else dynamo.provide()
    if missing:
        sys.stderr.write(f"NVIDIA Dynamo {dynamo.VERSION} is not compared with: {missing}\n")
    uvloop.run(run(arguments, compare=not missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
