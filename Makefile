# The two commands of the README are `make serve` and `make test`. The rest is for working on Penstock.
# Each makes what it needs: an environment in .venv, once, and again when pyproject.toml changes.

export PIP_DISABLE_PIP_VERSION_CHECK = 1

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
BIN := .venv/bin
# torch comes first and alone, so that the pinned build is the one that everything else finds.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: serve test test-slow test-fuzz test-schemas test-clients test-ops dashboard dashboard-picture check lint bench-batching bench-scheduler bench-front-end bench-event bench-metrics bench-structured bench-cpu bench-gpu docs clean

serve: .venv/installed
	$(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

# All that needs no GPU, but for what is marked slow. A file's tests stay in one process, as they
# share servers; WORKERS=0 runs all of them in one, as a debugger needs it, and as one GPU does.
WORKERS ?= $(if $(wildcard /dev/nvidiactl),0,2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: .venv/installed-dev
	$(PYTEST) -m "not slow"

# The rest: kernels in Triton's interpreter, for a minute and a half.
test-slow: .venv/installed-dev
	$(PYTEST) -m slow

# Whatever the schema allows, bodies nearly right, and bytes nearly HTTP: no server error, no answer of
# another shape than promised, none later than five seconds. Takes five minutes.
test-fuzz: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.schema
	$(BIN)/python -m tests.fuzz.bodies 120
	$(BIN)/python -m tests.fuzz.http 60

# Other people's clients, installed from their registries into build/clients; node is needed for
# those in JavaScript. CLIENTS="langchain litellm" runs some of them alone.
test-clients: .venv/installed-dev
	$(BIN)/python -m tests.clients $(CLIENTS)

# 200 JSON schemas, asked of the demo model and of random weights: what ends, validates.
test-schemas: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.many_schemas

# What runs beside the server, with the real programs. OPS="tests/ops/test_dashboards.py" runs a part:
# a minute with Prometheus, which is had from Debian if it is not installed, a minute each with
# Chromium and Firefox (apt-get install chromium firefox-esr), which look at the page, and ten minutes
# the first time, two later, with buildah and podman, which build and run the images; a skipped test
# says what to install.
OPS ?= tests/ops
test-ops: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[ops]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(OPS)

# The Grafana dashboard, after a change in configs/grafana/dashboard.py.
dashboard: .venv/installed
	$(BIN)/python -m penstock.configs.grafana.dashboard > configs/grafana/penstock.json

# configs/grafana/dashboard.png: the dashboard on a demo server under five minutes of load, drawn by
# Grafana's own components, without Grafana. Needs nodejs, npm and chromium (apt-get install them).
dashboard-picture: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.ops.picture

# What every commit passes: style, types, import rules, tests. `.ci/run` adds `make test-slow`.
check: lint test

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tables of docs/ that are made from the code; a test fails when they are out of date.
docs: .venv/installed
	$(BIN)/python -m tests.docs.tables --write

bench-batching: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.server.batching

bench-scheduler: .venv/installed
	$(BIN)/python -m tests.bench.scheduler_step

bench-front-end: .venv/installed
	$(BIN)/python -m tests.bench.server.front_end

# What a JSON schema costs, as a share of the plain throughput.
bench-structured: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.server.structured

# What one streamed token costs the server, by part.
bench-event: .venv/installed
	$(BIN)/python -m tests.bench.server.sse_event

# What metrics cost a step, a request and a scrape.
bench-metrics: .venv/installed
	$(BIN)/python -m tests.bench.server.metrics

bench-cpu: .venv/installed
	$(BIN)/python -m tests.bench.engine cpu-decode --threads $$(nproc)

# All that is to be known on one GPU, in 9 minutes; ARGS=--tiny tries it out without one.
bench-gpu: .venv/installed-dev
	$(BIN)/python -m tests.bench.gpu.suite $(ARGS)

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or later; name one with PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH)
	@touch $@

.venv/installed: pyproject.toml .venv/made
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .hypothesis
