# Everything that a person types. `make` alone lists it.
#
#   make serve MODEL=Qwen/Qwen3-0.6B PORT=9000 ARGS="--max-num-seqs 64"
#
# .venv is made when it is missing or older than pyproject.toml and constraints.txt; afterwards a start takes seconds.

HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
# pip, or uv: quicker, but it reads none of pip's configuration.
INSTALLER ?= pip
# Processes that share the tests: each loads torch, so more than there are cores only costs memory.
WORKERS ?= 2
EXAMPLES ?=

# The C library asks the kernel for huge pages: a step on the CPU reads the keys and values of all its rows, scattered over
# the pool, and with torch's kernels all weights (those of the native kernels lie in huge pages anyway).
HUGE_PAGES := GLIBC_TUNABLES=glibc.malloc.hugetlb=1

BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
UV_PIN := uv==0.13.9
export VENV PYTHON TORCH_INDEX INSTALLER UV_PIN

COMPAT := .venv-compat
COMPAT_INSTALLED := $(COMPAT)/.installed$(if $(LOAD),-load)
WEBUI := .venv-webui
LOAD ?=
MINUTES ?= 1.5
SEED ?=
RECORD ?=

.PHONY: help install serve test test-compat check format soak soak-mix bench-cpu bench-mm test-gpu sanitize-gpu pins locks release clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

install: $(DEV)  ## Set .venv up with what tests and checks need: INSTALLER=uv is quicker

serve: $(RUNTIME)  ## Start the server: HOST, PORT, MODEL, ARGS
	@exec env $(HUGE_PAGES) $(BIN)/pagewalk serve --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(DEV)  ## Run every deterministic test that needs no GPU; EXAMPLES=10: more of what tests draw
	EXAMPLES=$(EXAMPLES) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m "not gpu and not soak and not compat" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-compat: $(RUNTIME) $(COMPAT_INSTALLED)  ## Run other people's clients (docs/compat.md); LOAD=1: the large ones too
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python OPEN_WEBUI=$(CURDIR)/$(WEBUI)/bin/open-webui OMP_WAIT_POLICY=PASSIVE \
		$(COMPAT)/bin/python -m pytest tests/compat -m compat -W default $(ARGS)

check: $(DEV)  ## Format, lint, types, direction of imports, container files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml

format: $(DEV)  ## Format the code, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(DEV)  ## Run the tests that take minutes or measure times
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m "soak and not gpu" $(ARGS)

soak-mix: $(DEV)  ## Run a random mix of everything with faults, each answer checked: MINUTES, SEED, RECORD=FILE
	MINUTES=$(MINUTES) SEED=$(SEED) RECORD=$(RECORD) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest tests/faults/test_soak_mix.py -m soak $(ARGS)

bench-cpu: $(DEV)  ## Measure this server beside transformers, on the CPU; prints one line of JSON last
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m bench.cpu $(ARGS)

bench-mm: $(DEV)  ## Time the memory manager alone, beside transformers' paged cache; prints one line of JSON last
	@$(BIN)/python -m bench.mm $(ARGS)

test-gpu:  ## Run the tests that need an NVIDIA GPU, with the Python that PYTHON names (it has torch and cupy)
	$(PYTHON) -m pytest tests/cuda tests/faults tests/service/test_golden.py tests/service/test_golden_families.py -m "gpu and not soak" $(ARGS)

sanitize-gpu:  ## Look for bad addresses and races in the kernels, with compute-sanitizer and the Python that PYTHON names
	PYTHON=$(PYTHON) sh scripts/sanitize.sh

pins: $(DEV)  ## Write what is installed into constraints.txt
	@sh scripts/pins.sh

locks:  ## Write deploy/locks: what the images install, by hash (needs uv)
	@sh scripts/locks.sh

release:  ## Build wheel and sdist into dist/, and try the wheel in a clean venv: EXTRA (cuda)
	@sh scripts/release.sh

clean:  ## Remove .venv and all caches
	rm -rf $(VENV) $(COMPAT) $(WEBUI) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(RUNTIME): pyproject.toml constraints.txt constraints-cpu.txt scripts/install.sh
	@sh scripts/install.sh .
	@touch $@

$(COMPAT_INSTALLED): $(wildcard tests/compat/requirements*.txt)
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip install -q $(UV_PIN)  # pip needs ten minutes to choose the versions
	$(COMPAT)/bin/uv pip install -q --python $(COMPAT) -r tests/compat/requirements.txt $(if $(LOAD),-r tests/compat/requirements-load.txt)
ifdef LOAD
	$(COMPAT)/bin/uv pip install -q --python $(COMPAT) --no-deps -r tests/compat/requirements-alone.txt
	$(COMPAT)/bin/uv venv -q --clear $(WEBUI)
	$(COMPAT)/bin/uv pip install -q --python $(WEBUI) -r tests/compat/requirements-webui.txt
endif
	@touch $@

$(DEV): pyproject.toml constraints.txt constraints-cpu.txt scripts/install.sh
	@sh scripts/install.sh '.[dev]'
	@touch $@ $(RUNTIME)
