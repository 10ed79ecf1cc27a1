# Everything runs from the virtual environment that `make` builds by itself from requirements.lock.
.DEFAULT_GOAL := help
SHELL := /bin/sh

VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
# For pictures and other libraries; what make's caller adds to a benchmark's command line is in BENCH.
BENCH_VENV  := .bench
BENCH_READY := $(BENCH_VENV)/.ready
# Tests wait for servers and time-outs far more than they compute.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo docs bench bench-peers bench-env test test-unit check format lock wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## build the virtual environment (every other target does this by itself)

# The newest supported Python that really runs: a pyenv shim may be on PATH and still refuse.
$(READY): requirements.lock pyproject.toml
	@python=$${PYTHON:-}; \
	for candidate in python3.14 python3.13 python3.12 python3.11 python3.15 python3 python; do \
	  [ -n "$$python" ] && break; \
	  "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python=$$candidate; \
	done; \
	if $(BIN)/python -m pip --version >/dev/null 2>&1; then exit 0; fi; \
	[ -n "$$python" ] || { echo "make: no Python 3.11 or newer found; install one or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; }; \
	"$$python" -c 'import ensurepip' 2>/dev/null || { echo "make: $$python has no ensurepip; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }; \
	echo "setting up $(VENV) with $$("$$python" --version 2>&1)"; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --editable .
	@touch $@

demo: $(READY) ## start a real broker and Postgres, run the processor, show that nothing is lost or doubled
	@$(BIN)/python -m demo

bench-env: $(BENCH_READY) ## build the environment for pictures and peers

$(BENCH_READY): $(READY) benchmarks/requirements.txt $(wildcard benchmarks/peers/requirements.txt)
	@echo "setting up $(BENCH_VENV)"
	@$(BIN)/python -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(patsubst %,-r %,$(wildcard benchmarks/requirements.txt benchmarks/peers/requirements.txt))
	@touch $@

bench-peers: $(BENCH_READY) ## the same work by other Python libraries, in an environment of their own
	@$(BIN)/python -m benchmarks peers $(BENCH)

bench: $(READY) ## measure it beside a bare loop, with the limits of both servers (about 8 minutes)
	@$(BIN)/python -m benchmarks run $(BENCH)

test: $(READY) ## all tests, on a real broker and a real Postgres; then how much of each room they ran
	@rm -rf .coverage && mkdir .coverage
	@$(BIN)/python -m coverage run -m pytest $(PARALLEL); status=$$?; $(BIN)/python -m tests.support.rooms; exit $$status

test-unit: $(READY) ## only the tests that need no server
	@$(PYTEST) tests/unit

check: $(READY) ## format, lint and strict types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## rewrite the sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(READY) ## write the tables of docs/configuration.md again, from the settings' schema
	@$(BIN)/python -m processor.settings.reference

lock: ## pin the newest versions again (needs uv)
	@uv pip compile --universal --python-version 3.11 --upgrade --generate-hashes --no-annotate --no-header \
	  --no-emit-index-url --quiet --extra stack --group dev pyproject.toml --output-file requirements.lock

wheel: $(READY) ## build dist/*.whl
	@$(BIN)/python -m build --wheel --no-isolation

clean: ## stop the local stack; remove the environment, caches and build results
	@if [ -x $(BIN)/processor ]; then $(BIN)/processor stack down --quiet; fi
	rm -rf $(VENV) $(BENCH_VENV) .stack .coverage .mypy_cache .pytest_cache .ruff_cache dist
