"""`python -m ops.bench`: measure beside NVIDIA Dynamo's index; the last line is one JSON object."""

import argparse
import hashlib
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import uvloop

from ops.logs import configure

DYNAMO = "ai-dynamo-runtime==1.6.1"
_PROJECT = Path(__file__).parents[2]
_VENV = _PROJECT / ".kvatlas" / "bench"


def main() -> int:
    """Return the exit code; without Dynamo, begin again in an environment that has it."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the prefix tree")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--event-blocks", type=int, default=16, help="of one engine event")
    parser.add_argument("--merged", type=int, default=8, help="engine events that a busy relay says in one record")
    parser.add_argument("--queries", type=int, default=600, help="prompts of each length")
    parser.add_argument("--redis-server", type=Path, help="instead of the Valkey that comes with kvatlas[embedded]")
    parser.add_argument("--no-indexer", action="store_true", help="leave Dynamo's HTTP indexer out")
    arguments = parser.parse_args()
    if find_spec("dynamo") is None:
        _begin_again()
    from ops.bench.run import run

    configure("error", "console", sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.ERROR)  # it warns of leaders that are only just chosen
    uvloop.run(run(arguments))
    return 0


def _begin_again() -> None:
    """Put a process in this one's place whose environment has Dynamo beside this package."""
    python = str(_VENV / "bin" / "python")
    wanted = hashlib.sha256((_PROJECT / "pyproject.toml").read_bytes() + DYNAMO.encode()).hexdigest()
    made = _VENV / "made-for"
    if not made.exists() or made.read_text() != wanted:
        sys.stderr.write(f"installing {DYNAMO} beside kvatlas in {_VENV.relative_to(_PROJECT)}\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(_VENV)], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--editable", f"{_PROJECT}[embedded]", DYNAMO], check=True)
        made.write_text(wanted)
    os.execv(python, [python, "-m", "ops.bench", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
