# The README uses `make serve` and `make test`; the other targets are for the development of Penstock.
# Each creates the environment in .venv if needed, and again when pyproject.toml changes.

export PIP_DISABLE_PIP_VERSION_CHECK = 1

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
BIN := .venv/bin
# The build of torch: cpu, cuda, or auto, which is cpu where there is no NVIDIA device. Given, it replaces
# the one that is installed: make serve TORCH=cuda. uv knows an index of CPU builds; TORCH_INDEX=URL names
# another.
TORCH_INDEX ?=
TORCH_PIN := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
INSTALL_TORCH = $(BIN)/python install_torch.py --build $(or $(TORCH),auto) --index "$(TORCH_INDEX)" $(TORCH_PIN)

.PHONY: serve test test-slow test-fuzz test-schemas test-clients test-models test-llama quality test-ops test-distributed test-chaos test-ladder test-release version dist images dashboard dashboard-picture page-libraries check lint bench-batching bench-scheduler bench-lora bench-front-end bench-event bench-metrics bench-structured bench-cpu peers bench-peers peers-table bench-gpu gpu-bundle gpu-cache gpu-rehearsal kernel-table docs clean

serve: .venv/installed
	$(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

# All that needs no GPU, but for what is marked slow. A file's tests stay in one process, as they
# share servers; WORKERS=0 runs all of them in one, as a debugger needs it, and as one GPU does.
WORKERS ?= $(if $(wildcard /dev/nvidiactl),0,2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: .venv/installed-dev
	$(PYTEST) -m "not slow"

# The rest: kernels in Triton's interpreter, and steps compiled for other processors; 10 to 30 minutes on
# two cores, as processors differ, which is why each has more time before it counts as stuck.
test-slow: .venv/installed-dev
	$(PYTEST) -m slow --timeout 900

# Requests that the OpenAPI schema allows, mutated bodies and malformed HTTP: no server error, no response
# of an undocumented shape, none later than five seconds; and damaged GGUF and tokenizer.json files. Takes ten minutes.
test-fuzz: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.schema
	$(BIN)/python -m tests.fuzz.bodies 120
	$(BIN)/python -m tests.fuzz.http 60
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.files

# Third-party clients, installed from their registries into build/clients; those in JavaScript need
# node. CLIENTS="langchain litellm" runs only some of them.
test-clients: .venv/installed-dev
	$(BIN)/python -m tests.clients $(CLIENTS)

# Quantized checkpoints: the tests' own against the formats' packages, which are put into build/packers
# without what they depend on, and each format through HTTP; and each family: answers of 200 tokens as
# transformers has them, and one through HTTP; and ten random checkpoints in odd shapes, of which
# `python -m tests.formats.odd --num 1000` answers more. Takes eight minutes.
test-models: .venv/installed-dev build/packers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/formats

# One file of AutoGPTQ is used, in Python: whichever wheel has it will do.
PIP_PACKERS = $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@
build/packers:
	$(PIP_PACKERS) compressed-tensors==0.20.0 autoawq==0.2.9 accelerate loguru psutil
	$(PIP_PACKERS) --only-binary :all: --python-version 3.11 --abi cp311 \
		--platform manylinux_2_17_x86_64 auto-gptq==0.7.1

# GGUF files of llama.cpp's own converter, answered by its server and by Penstock. It is installed first,
# into build/peers, which takes five minutes; then four.
test-llama: .venv/installed-dev
	$(BIN)/python -m tests.bench.peers install --peer llama
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/formats/test_llama_server.py tests/formats/test_llama_families.py

# What rounding the weights of the demo model costs, beside llama.cpp's Q8_0 and Q4_K_M: a table of docs/serving.md.
# And what rounding activations beside codes costs: a table of docs/quantized.md. Takes six minutes, and five more where llama.cpp is not installed yet.
quality: .venv/installed-dev
	$(BIN)/python -m tests.bench.peers install --peer llama
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.formats.quality
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.formats.activations

# 200 JSON schemas on the demo model and on random weights: every finished output must validate.
test-schemas: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.many_schemas

# The files for operators, with the real programs. OPS="tests/ops/test_dashboards.py" runs a part. It
# takes a minute with Prometheus (downloaded from Debian if it is not installed), a minute each with
# Chromium and Firefox for the page (apt-get install chromium firefox-esr), and ten minutes at first,
# later two, to build and run the images with buildah and podman. A skipped test says what to install.
OPS ?= tests/ops
test-ops: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[ops]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(OPS)

# Two replicas of the scripted engine in Ray Serve, in real processes on this machine: what passes, where it
# goes, and that streams end whole; every family on two ranks and in two stages beside one, and every quantized
# format; and some on two ranks of the GPU's path. It installs Ray (80 MB) first, and takes 12 minutes on two cores,
# 30 on busy ones.
test-distributed: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/distributed

# Builds the sdist and the wheel, installs it into a fresh environment and serves from there. PYTHONS names
# other Pythons to do so with, whose dependencies are then downloaded.
test-release: .venv/installed-dev
	OMP_NUM_THREADS=1 TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.release $(PYTHONS)

# Kills, stops and misleads engines of the demo model under mixed streams, compares all answers with
# undisturbed ones, and prints the table of docs/promises.md. Takes most of an hour on two cores;
# ARGS="--seed 7 kills soak" runs two parts, ARGS=--short a small form of all in five minutes.
test-chaos: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(ARGS)

# Writes the version of pyproject.toml wherever else it stands.
version: .venv/installed-dev
	$(BIN)/python -m tests.release.version --write

dist: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# IMAGE:VERSION for NVIDIA GPUs and IMAGE:VERSION-cpu for CPUs. DOCKER=podman builds them with podman.
DOCKER ?= docker
IMAGE ?= penstock
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
LABELS = --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD)
images:
	$(DOCKER) build -f docker/Dockerfile -t $(IMAGE):$(VERSION) $(LABELS) .
	$(DOCKER) build -f docker/Dockerfile.cpu -t $(IMAGE):$(VERSION)-cpu $(LABELS) \
		--build-arg TORCH_INDEX="$(TORCH_INDEX)" .

# The ladder of the GPU suite, without a GPU: each rung at toy sizes in Triton's interpreter, and each
# failure at each rung. Takes five minutes.
test-ladder: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/bench/ladder

# Writes the Grafana dashboard after a change in tests/ops/dashboard/build.py.
dashboard: .venv/installed
	$(BIN)/python -m tests.ops.dashboard.build > configs/grafana/penstock.json

# Draws configs/grafana/dashboard.png: the dashboard of a demo server under five minutes of load, with
# Grafana's own components but without Grafana. Needs apt-get install nodejs npm chromium.
dashboard-picture: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.ops.picture

# Fetches the libraries of the page at / from npm again, in the versions of libraries.json beside them.
# For another version, write it there first. Needs apt-get install nodejs npm.
page-libraries: .venv/installed-dev
	$(BIN)/python -m tests.ops.page_libraries --write

# What every commit passes: style, types, import rules, tests. `.ci/run` adds `make test-slow` and `make test-release`.
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

bench-lora: .venv/installed-dev
	$(BIN)/python -m tests.bench.engine.adapters

bench-scheduler: .venv/installed
	$(BIN)/python -m tests.bench.scheduler_step

bench-front-end: .venv/installed
	$(BIN)/python -m tests.bench.server.front_end

# The cost of a JSON schema, relative to the throughput without one.
bench-structured: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.server.structured

# The server's cost of one streamed token, by part.
bench-event: .venv/installed
	$(BIN)/python -m tests.bench.server.sse_event

# The cost of metrics per step, request and scrape.
bench-metrics: .venv/installed
	$(BIN)/python -m tests.bench.server.metrics

bench-cpu: .venv/installed
	$(BIN)/python -m tests.bench.engine cpu-decode --threads $$(nproc)
	$(BIN)/python -m tests.bench.engine cpu-prefill --threads $$(nproc)

# Installs the servers that Penstock is compared with on a CPU into build/peers, if they are not there: some
# five minutes each, of which llama.cpp's are compilation. ARGS="--peer llama" installs one.
peers: .venv/installed-dev
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.bench.peers install $(ARGS)

# Penstock and these servers in turns, with random weights in the shape SHAPE. ARGS="--peer llama --rounds 2"
# chooses some of them, and has the flags of `python -m tests.bench.in_turns`.
SHAPE ?= 135m
bench-peers: .venv/installed-dev
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.bench.peers compare $(SHAPE) $(ARGS)

# The same at bfloat16, int8 and int4, with long prompts and conversations: build/peers/peers-$(SHAPE).md.
peers-table: .venv/installed-dev
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.bench.peers table $(SHAPE) $(ARGS)

# All measurements on one GPU, in two commands of 9 minutes: the second has ARGS="--resume
# gpu_results/rows.jsonl". ARGS=--list says what takes how long; ARGS=--tiny is a dry run without a GPU.
bench-gpu: .venv/installed-dev
	$(BIN)/python -m tests.bench.gpu.suite $(ARGS)

# What a machine with a GPU needs that has torch and Triton, but no network, in one archive, and the command
# to run there. ARGS="--flash-attn-3 WHEEL" takes FlashAttention 3 along from a wheel of vLLM.
gpu-bundle: .venv/installed-dev
	$(BIN)/python -m tests.bench.gpu.bundle $(ARGS)

# That archive's suite at toy sizes in such an environment, without a network and without a GPU. It downloads
# torch's build for CUDA first (5 GB); then it takes three minutes. It needs Python 3.12.
gpu-rehearsal: gpu-bundle
	$(BIN)/python -m tests.bench.gpu.rehearsal

# What a version of Triton makes of the kernels on Hopper: registers, shared memory, matrix units. 3.6.0
# comes with torch 2.11, the oldest that the GPU suite takes. Fails if a kernel is over a limit.
TRITON ?= 3.6.0
kernel-table: build/triton-$(TRITON)
	PYTHONPATH=$< $(BIN)/python -m tests.support.kernel_table configs/models/*

# What the suite's parts and its tests launch on a Hopper, compiled here by the Triton that a machine has
# with torch 2.11; ARGS="--triton-cache build/triton_cache.tar.xz" of gpu-bundle takes it along.
gpu-cache: build/triton-$(TRITON)
	TRITON_INTERPRET=0 OMP_NUM_THREADS=1 TRITON_CACHE_DIR=build/gpu-cache PYTHONPATH=$< $(BIN)/python -m \
		tests.bench.gpu.compile probe models tiles tests --pack build/triton_cache.tar.xz

build/triton-%: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ triton==$*

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or later; name one with PYTHON=/path/to/python3"; exit 1; }
	@echo "an environment in .venv"; $(PYTHON) -m venv .venv
	@$(INSTALL_TORCH)
	@touch $@ $(if $(TORCH),.venv/torch-$(TORCH))

# torch is installed first and alone, so that everything else uses the pinned build.
.venv/torch-%: | .venv/made
	@rm -f .venv/torch-*
	@$(INSTALL_TORCH)
	@touch $@

.venv/installed: pyproject.toml .venv/made $(if $(TORCH),.venv/torch-$(TORCH))
	@$(BIN)/python install_torch.py --pip install --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
