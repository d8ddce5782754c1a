# Two commands are enough to start: `make demo` and `make test`. Both set up .venv by themselves.

VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
PROMPT ?= Explain in two sentences why the sky is blue.

# An interpreter with Python 3.12 or newer; `make PYTHON=/path/to/python test` chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && echo "$$p" && break; done)
UV     := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench gates clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.core ## answer a prompt with a small real model and show the speed
	@$(BIN)/inferjax generate "$(PROMPT)"

test: lint ## format, lint, types, import layers, tests and notebooks (on two cores 20 minutes the first time, 8 afterwards)
	@$(BIN)/pytest -n $(JOBS) --nbmake tests $(wildcard notebooks)

test-all: lint ## the same with the full lattices, the soaks and the real models
	@$(BIN)/pytest -n $(JOBS) -m "" --nbmake tests $(wildcard notebooks)

lint: $(VENV)/.test ## format check, lint, types and import layers
	@$(BIN)/ruff format --check --quiet . || \
		{ echo "Some files are not formatted: run '$(BIN)/ruff format .'" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright
	@layers=$$($(BIN)/lint-imports 2>&1) || { echo "$$layers" >&2; exit 1; }

bench: $(VENV)/.core ## prefill and decode speed beside the limits of this machine
	@$(BIN)/inferjax bench latency

# An environment of its own: the wheels of CUDA's compiler take 3 GB.
GATES := $(VENV)/gates/bin/python

gates: $(GATES) ## compile the GPU kernels without a GPU and check what they take
	@JAX_PLATFORMS=cpu $(GATES) -m tests.gates.record

$(VENV)/gates/bin/python: | $(VENV)/bin/python
	@$(BIN)/python -m venv $(VENV)/gates
	@$@ -m pip install -qq --disable-pip-version-check 'jax[cuda13]>=0.12,<0.13' jaxtyping

clean: ## remove the environment and everything that was generated
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment; the stamps say which part of pyproject.toml is installed in it. Installing builds
# the native kernels: their sources count too, as a library of other sources is not used.
NATIVE := hatch_build.py pallas_kernels/native/build.py \
	$(wildcard pallas_kernels/*/*.cc) $(wildcard pallas_kernels/*/*.h)

$(VENV)/.core: pyproject.toml $(NATIVE) $(VENV)/bin/python
	@echo "Installing inferjax into $(VENV) ..."
	@$(call install,-e .)
	@touch $@

$(VENV)/.test: pyproject.toml $(NATIVE) $(VENV)/bin/python
	@echo "Installing inferjax with the test tools into $(VENV) ..."
	@$(call install,-e '.[test]')
	@touch $@ $(VENV)/.core

$(VENV)/bin/python:
ifneq ($(UV),)
	@uv venv --quiet --python '>=3.12' $(VENV)
else ifneq ($(PYTHON),)
	@"$(PYTHON)" -m venv $(VENV)
else
	@echo "inferjax needs Python 3.12 or newer, and none of python3, python3.12 ... python3.14 is." >&2
	@echo "Install one (or uv, which brings its own), or say make PYTHON=/path/to/python" >&2
	@exit 1
endif

ifneq ($(UV),)
install = uv pip install --quiet --python $(BIN)/python $(1)
else
install = $(BIN)/python -m pip install -qq --disable-pip-version-check $(1)
endif
