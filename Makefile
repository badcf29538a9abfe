# Needs Python 3.11, 3.12 or 3.13, pip and make; everything else is installed into .venv. A C++ compiler, where there
# is one, builds the native CPU kernels.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

# The first of some commands that runs. pyenv has one for each version that it knows, which runs only where that version
# is chosen; otherwise it is looked for where pyenv installs it.
RUNS = $(shell for name in $(1); do for python in "$$name" $${PYENV_ROOT:-$$HOME/.pyenv}/versions/*/bin/"$$name"; do \
	"$$python" -V > /dev/null 2>&1 && echo "$$python" && exit; done; done)
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTHONS := python3.11 python3.12 python3.13
# PYTHON=python3.12 has its own environment where .venv is of another version, whose packages are of no use to it.
ifneq ($(filter command% environment%,$(origin PYTHON)),)
override PYTHON := $(or $(call RUNS,$(PYTHON)),$(error PYTHON=$(PYTHON): there is no such command that runs))
OTHER := $(if $(wildcard .venv/bin/python),$(filter-out $(call VERSION_OF,.venv/bin/python),$(call VERSION_OF,$(PYTHON))))
else
PYTHON = $(or $(call RUNS,$(PYTHONS)),$(error none of $(PYTHONS) is here: PYTHON=… names another))
endif
VENV ?= .venv$(addprefix -,$(OTHER))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What runs the default model, without torch and the developers' tools. `make demo` needs no more, unless no compiler
# builds the native kernels, in whose place torch computes.
RUNNABLE := $(VENV)/.runnable
COMPILER := $(shell command -v $${CXX:-c++ g++ clang++})
NEEDS_ALL := $(or $(filter-out demo,$(or $(MAKECMDGOALS),help)),$(wildcard $(INSTALLED)),$(if $(COMPILER),,torch))
ENVIRONMENT := $(if $(NEEDS_ALL),$(INSTALLED),$(RUNNABLE))
COMPILED := $(VENV)/.compiled
KERNELS := outrider/engine/cpu_kernels
LIBRARIES := $(VENV)/.kernels
READY := $(COMPILED) $(LIBRARIES)
# Compiling all packages to bytecode takes as long as the rest of the install, so what the services import is compiled
# (SERVICES). Otherwise each start would compile it again where this variable is set (10 s instead of 4).
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check
SERVICES := decode_node.node, draft_node.node, outrider.cli.main, prefill_node.node, router.__main__, \
	grpc._interceptor, grpc._server
comma := ,
PYTEST_ARGS ?=

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

# First what is one file for everybody, compared by hash, and torch, of which each index has another build: by two
# processes, as each takes one processor. Then what else that torch needs, and us.
HALF_OF_LOCK = <(awk '/^[^ \#]/ { n++ } n % 2 == $(2)' $(1))
$(RUNNABLE): pyproject.toml constraints.txt requirements-node.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes --no-deps -r $(call HALF_OF_LOCK,requirements-node.lock,0) & half=$$!; \
		$(PIP_INSTALL) --require-hashes --no-deps -r $(call HALF_OF_LOCK,requirements-node.lock,1) \
		|| { kill $$half; exit 1; }; wait $$half
	$(PIP_INSTALL) -c constraints.txt -e '.[node]'
	touch $@

$(INSTALLED): pyproject.toml constraints.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes --no-deps -r $(call HALF_OF_LOCK,requirements.lock,0) & half=$$!; \
		{ $(PIP_INSTALL) --require-hashes --no-deps -r $(call HALF_OF_LOCK,requirements.lock,1) \
		&& $(PIP_INSTALL) --no-deps -c constraints.txt torch; } || { kill $$half; exit 1; }; wait $$half
	$(PIP_INSTALL) -c constraints.txt -e '.[node,dev]'
	touch $@

$(COMPILED): $(ENVIRONMENT)
	$(BIN)/python -m compileall -q -j 2 outrider router prefill_node decode_node draft_node
	$(BIN)/python -c 'import $(SERVICES)$(if $(filter $(INSTALLED),$(ENVIRONMENT)),$(comma) outrider.model_hub.load)'
	touch $@

# What makes releases, not what is released.
TOOLS := .venv-tools
$(TOOLS)/.installed:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install -q --disable-pip-version-check uv
	touch $@

LOCK := $(TOOLS)/bin/uv pip compile -q --generate-hashes --no-annotate --python-version 3.11 \
	--custom-compile-command 'make lock'
.PHONY: lock
lock: $(TOOLS)/.installed ## Hashes of what constraints.txt pins, after a change of it
	grep -vE '^(torch|triton)==' constraints.txt | $(LOCK) - --no-deps -o requirements.lock
	$(LOCK) pyproject.toml --extra node -c constraints.txt -o requirements-node.lock

.PHONY: wheel
wheel: $(INSTALLED) ## A wheel in dist; nodes compile the kernels when they first start
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .

$(LIBRARIES): $(wildcard $(KERNELS)/*.py $(KERNELS)/source/*) | $(ENVIRONMENT)
	$(BIN)/python -m outrider.engine.cpu_kernels.build
	touch $@

.PHONY: setup
setup: $(READY) ## Make .venv and install everything from the pinned constraints

.PHONY: demo
demo: $(READY) ## Four services, three prompts with and without speculation, and a decode node killed in an answer
	$(BIN)/outrider demo

.PHONY: test
test: $(READY) ## The test suite (PYTEST_ARGS='-k name' for a part of it, PYTEST_ARGS='-n 0' in one process)
	$(BIN)/python -m pytest -n 4 -m 'not triton' $(PYTEST_ARGS)

# Torch's build without CUDA may be there for one Python only: tests of what another one breaks do without torch.
TESTABLE := $(VENV)/.testable
$(TESTABLE): pyproject.toml constraints.txt requirements-node.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes --no-deps -r requirements-node.lock
	$(PIP_INSTALL) -c constraints.txt -e '.[node,test]'
	touch $@

.PHONY: test-units
test-units: $(TESTABLE)
	$(BIN)/python -W error::SyntaxWarning -m compileall -q -f outrider router prefill_node decode_node draft_node
	$(BIN)/python -c 'import $(SERVICES)'
	$(BIN)/python -m pytest -n 4 $(addprefix tests/,client config constraints rpc service wire) $(PYTEST_ARGS)

OTHER_PYTHONS = $(filter-out python$(call VERSION_OF,.venv/bin/python),python3.13 python3.12 python3.11)
.PHONY: test-python
test-python: $(INSTALLED) ## Unit tests without torch on the newest other Python that is here; says so where there is none
	@other='$(call RUNS,$(OTHER_PYTHONS))'; if [ -n "$$other" ]; then $(MAKE) --no-print-directory PYTHON="$$other" test-units; \
		else echo 'make test-python: left out, as none of $(OTHER_PYTHONS) runs here'; fi

# Triton is large (690 MB installed), and only these need it.
TRITON := $(VENV)/.triton
$(TRITON): $(INSTALLED)
	$(PIP_INSTALL) -c constraints.txt -e '.[triton]'
	touch $@

.PHONY: test-triton
test-triton: $(READY) $(TRITON) ## What needs Triton, in its interpreter: GPU kernels on a CPU
	$(BIN)/python -m pytest -n 2 --dist worksteal -m triton tests/engine tests/contract tests/speculation $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(READY) $(TRITON) ## All there is: whole matrices, long soaks, sanitizers, containers; says what it left out and why
	$(BIN)/python checks/test_all.py $(PYTEST_ARGS)

CHROMIUM := chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable
APT := timeout 180 apt-get -qy -o Acquire::Retries=1 -o Acquire::http::Timeout=30
.PHONY: browser
browser: ## Chromium, for the tests and pictures of the router's page, from Debian's packages; says so where it cannot
	@if [ -n "$$(command -v $(CHROMIUM))" ]; then exit; fi; \
	without="make browser: no Chromium; tests of the router's page will be skipped:"; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then echo "$$without needs apt-get and root"; exit; fi; \
	log=$$(mktemp) && trap 'rm "$$log"' EXIT; \
	{ $(APT) update && DEBIAN_FRONTEND=noninteractive $(APT) install --no-install-recommends chromium-headless-shell; } \
		> "$$log" 2>&1 || echo "$$without $$(tail -1 "$$log")"

.PHONY: pictures
pictures: $(READY) browser ## The pictures of the router's page in docs/figures, of a cluster that is started for them
	$(BIN)/python -m benchmarks.pictures

.PHONY: gemma
gemma: $(ENVIRONMENT) ## A second real model for tests, Gemma 3 270M as GGUF, under Gemma's own terms of use
	$(BIN)/python checks/gemma.py

FAULTS_ARGS ?=
.PHONY: faults
faults: $(READY) ## Every fault at every point of the protocol; writes docs/faults.md (FAULTS_ARGS=--failed: again)
	$(BIN)/python -m tests.faults.make_table $(FAULTS_ARGS)

.PHONY: models
models: $(READY) ## Every family of models compared with transformers; writes docs/models.md
	$(BIN)/python -m tests.families.page

FUZZ_EXAMPLES ?= 3000
.PHONY: fuzz
fuzz: $(READY) ## Any bytes to every method and to KV ingest, for minutes (FUZZ_EXAMPLES=100000; the suite has a short run)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -n 2 --timeout 3600 tests/fuzz $(PYTEST_ARGS)

SOAK_SECONDS ?= 600
SOAK_ARGS ?=
.PHONY: soak
soak: $(READY) ## Mixed load and a random fault every five seconds (SOAK_SECONDS=180, SOAK_ARGS='--seed 1')
	$(BIN)/python -m tests.faults.soak --seconds $(SOAK_SECONDS) $(SOAK_ARGS)

.PHONY: compose-test
compose-test: $(INSTALLED) ## Builds the image and runs clusters of containers; says so where there is no Docker engine
	$(BIN)/python -m pytest -m compose tests/compose $(PYTEST_ARGS)

CHECKS := check-types check-tests check-style check-imports check-protos check-kernels check-files check-chart
.PHONY: check $(CHECKS)
check: $(CHECKS) ## Lint, types, import rules, wire contract, stubs, file sizes, C++ warnings, container files, Helm chart; finds all tests

check-style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mdformat --check $$(git ls-files '*.md')
	$(BIN)/python checks/file_sizes.py
	$(BIN)/python checks/references.py
	$(BIN)/python -m compileall -q examples benchmarks

check-types: $(INSTALLED)
	$(BIN)/mypy

# This compiles the tests, too. If it has not run, each worker of `make test` compiles all of them.
check-tests: $(COMPILED)
	found=$$($(BIN)/python -m pytest --collect-only -qq) || { echo "$$found"; exit 1; }

check-imports: $(INSTALLED)
	$(BIN)/lint-imports

check-protos: $(INSTALLED)
	$(BIN)/buf lint
	released=$$(mktemp -d) && trap 'rm -r "$$released"' EXIT \
		&& cp -r "$$(find protos/released -mindepth 1 -maxdepth 1 | sort -V | tail -1)/." "$$released" \
		&& $(BIN)/buf breaking --against "$$released"  # buf takes no part of this tree's own module
	$(BIN)/python checks/stubs.py

check-kernels: $(INSTALLED)
	$(BIN)/python checks/kernels.py

check-files: $(INSTALLED)
	$(BIN)/hadolint Dockerfile tests/compose/*.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.*.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yaml
	$(BIN)/check-jsonschema --schemafile checks/schemas/prometheus.json deploy/prometheus/*.yaml
	$(BIN)/check-jsonschema --schemafile checks/schemas/grafana-datasources.json deploy/grafana/provisioning/datasources/*.yaml
	$(BIN)/check-jsonschema --schemafile checks/schemas/grafana-dashboards.json deploy/grafana/provisioning/dashboards/*.yaml

check-chart: $(INSTALLED)
	$(BIN)/python -m checks.chart

.PHONY: chart
chart: $(INSTALLED) ## Render the Helm chart anew for its golden files, and the table of its values
	$(BIN)/python -m checks.chart --write

.PHONY: gpu-kernels
gpu-kernels: $(TRITON) ## Our Triton kernels compiled for three generations of GPUs, and in the interpreter; needs no GPU
	$(BIN)/python checks/gpu_kernels.py
	$(BIN)/python -m pytest --full tests/engine/gpu_kernels $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(READY) ## What needs a GPU: attention, race, products, hand-off and the engine; needs torch for CUDA in .venv
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
	$(BIN)/python -m pytest --full -n 0 -m gpu tests/gpu tests/engine/gpu_kernels tests/contract/test_attention_backends.py $(PYTEST_ARGS)

# A GPU that is lent for a quarter of an hour comes with a Python of its own and no package index (CONTRIBUTING.md).
# This is that Python, what travels to it, and the script of the day without a GPU.
REPLICA := .venv-gpu-replica
REPLICA_INSTALL := $(REPLICA)/bin/python -m pip install -q --no-compile --disable-pip-version-check
REPLICA_PYTHON = $(or $(call RUNS,python3.12),python3.12)
# Triton 3.6 interprets kernels with numpy below 2.4 only, and the machine has a newer one.
$(REPLICA)/.installed: checks/gpu_replica.txt
	test -x $(REPLICA)/bin/python || $(REPLICA_PYTHON) -m venv $(REPLICA)
	$(REPLICA_INSTALL) -r $<
	$(REPLICA_INSTALL) --no-deps --upgrade --target $(REPLICA)/interpreter 'numpy<2.4'
	$(REPLICA)/bin/python -c 'import accelerate, grpc, hypothesis, pytest, torch, transformers.models.llama.modeling_llama, triton'
	touch $@

.whl/.complete: checks/gpu_wheels.txt constraints.txt $(REPLICA)/.installed
	rm -rf .whl
	$(REPLICA)/bin/python -m pip download -q --no-deps --only-binary=:all: -c constraints.txt -r $< -d .whl
	touch $@

.kernels/.complete: $(wildcard $(KERNELS)/*.py $(KERNELS)/source/*) $(REPLICA)/.installed
	rm -rf .kernels
	OUTRIDER_CACHE_DIR=.kernels $(REPLICA)/bin/python -m outrider.engine.cpu_kernels.build --all
	touch $@

.PHONY: gpu-replica
gpu-replica: $(REPLICA)/.installed ## The Python of a lent GPU machine, in .venv-gpu-replica (5 GB)

TRAVELS_BYTES := 62914560
.PHONY: gpu-pack
gpu-pack: .whl/.complete .kernels/.complete ## What a lent GPU machine lacks: wheels in .whl, CPU kernels in .kernels
	@size=$$({ git ls-files -z --cached --others --exclude-standard --deduplicate; find .whl .kernels -type f -print0; } \
		| xargs -0 stat -c %s | awk '{ sum += $$1 } END { print sum }'); \
	echo "make gpu-pack: $$size bytes travel, of $(TRAVELS_BYTES) at most"; test "$$size" -le $(TRAVELS_BYTES)

GPU_DAY_ARGS ?=
.PHONY: gpu-dry
gpu-dry: gpu-pack ## The script of a GPU day on a CPU, with small shapes and only the packages of such a machine
	folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT \
		&& $(REPLICA_INSTALL) --no-index --no-deps --target "$$folder/site" .whl/*.whl \
		&& PYTHONPATH="$$folder/site:$$PWD" OUTRIDER_CACHE_DIR="$$PWD/.kernels" $(REPLICA)/bin/python checks/gpu_day.py \
			--out .gpu-day --scratch "$$folder/scratch" --device cpu $(GPU_DAY_ARGS)

.PHONY: sanitize
sanitize: $(INSTALLED) ## The native kernels' tests with address and undefined-behaviour sanitizers
	$(BIN)/python checks/sanitize.py $(PYTEST_ARGS)

.PHONY: references settings
references: $(INSTALLED) ## Generate the pages on settings, command line, metrics and messages from the code
	$(BIN)/python checks/references.py --write

settings: references

.PHONY: docs
docs: $(INSTALLED) ## The documentation as a site, in site/; the tests build it too, and check every link and heading
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, it would count no warning
	@echo 'site/index.html; to read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site'

.PHONY: proto
proto: $(INSTALLED) ## Generate outrider/v1 and docs/protos.md from protos
	$(BIN)/python checks/stubs.py --write
	$(BIN)/python checks/references.py --write

.PHONY: format
format: $(INSTALLED) ## Format code and prose, and fix what ruff can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/mdformat $$(git ls-files '*.md')

.PHONY: bench
bench: $(READY) ## Reference figures, the load generator with and without speculation, reference again
	$(BIN)/python benchmarks/reference.py
	$(BIN)/outrider bench compare --concurrency 1,4,8,16
	$(BIN)/python benchmarks/reference.py

PROPOSER_ARGS ?=
.PHONY: vllm-proposer-test
vllm-proposer-test: $(READY) ## vLLM's CPU build, fetched for it (2 GB), with our draft nodes in every state (PROPOSER_ARGS='--rounds 5')
	$(BIN)/python benchmarks/vllm_proposer.py $(PROPOSER_ARGS)

.PHONY: clean
clean: ## Remove what the tools made, .venv included
	rm -rf .venv .venv-* build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf .whl .kernels .gpu-day $(REPLICA)
