# Everything here sets up what it needs; a machine needs Python 3.11 or later and make.
PYTHON ?= python3
SECONDS ?= 60
FLEET ?= vllm
PYTEST_ARGS ?=
BIN := .venv/bin

.PHONY: help demo test lint types bench lock clean

help:
	@echo "make demo [SECONDS=60] [FLEET=mixed]  run simulated engines, the whole stack and a client"
	@echo "make test [PYTEST_ARGS=tests/unit]     run the tests, all of them on a real Kafka and a real Valkey"
	@echo "make lint types                        check style and types"
	@echo "make bench                             measure beside NVIDIA Dynamo's index"

demo: .venv/ready
	@$(BIN)/kvatlas demo --seconds $(SECONDS) --fleet $(FLEET)

test: .venv/ready
	$(BIN)/pytest $(PYTEST_ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python -m ops.bench

.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvatlas needs Python 3.11 or later; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

# for maintainers, with uv: pins and hashes of everything, without any index's address
lock:
	uv lock
	uv export --frozen --quiet --all-groups --all-extras --no-emit-project --output-file requirements.lock
	uv export --frozen --quiet --no-default-groups --no-emit-project --output-file requirements-runtime.lock

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
