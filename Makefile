# Everything a clean clone needs: `make demo`, `make test`. Both build .venv first, with the pins of
# constraints.txt. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.loraplex-installed
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Two processes by default: that is what a small CI machine has. `make test WORKERS=8`.
WORKERS ?= 2
ARGS ?=

# make gpu-check uses the interpreter that already holds a CUDA torch; nothing is installed.
GPU_PYTHON := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)
GPU_WORKERS ?= 16
RESULTS ?= benchmarks/results

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP)  ## .venv with the package and all extras, at the pinned versions

# torch goes first and by exact version, so that a CPU build which pip finds on this machine serves it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("loraplex needs Python 3.10 or newer, %s is %d.%d: make PYTHON=python3.12 ..." % (sys.executable, v[0], v[1]) if v < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q "$(TORCH)"
	$(PIP) install -q -c constraints.txt -e ".[hf,bench,metrics,dev]"
	@touch $@

.PHONY: demo
demo: $(STAMP)  ## serve one mixed batch on the embedded model and compare it with PEFT
	$(BIN)/loraplex demo $(ARGS)

.PHONY: test
test: $(STAMP)  ## the test suite (on CPU through Triton's interpreter); ARGS="-k routing -x"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: lint
lint: $(STAMP)  ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

.PHONY: format
format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: peft-matrix
peft-matrix: $(STAMP)  ## the tests against peft, with every version from 0.18 on (fetches them)
	PYTHON=$(BIN)/python tools/peft_matrix.sh $(ARGS)

.PHONY: check
check: lint types test  ## lint, types and tests: what CI runs

.PHONY: bench
bench: $(STAMP)  ## the step-by-step benchmark; ARGS="--m 16 --plot ladder.png"
	$(BIN)/loraplex bench steps $(ARGS)

.PHONY: gpu-check
gpu-check: gpu-test gpu-bench  ## on a GPU machine: all tests, loraplex check, loraplex bench steps

# tests/compile needs no GPU and is part of make check.
.PHONY: gpu-test
gpu-test:
	@$(PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "make gpu-check needs a GPU, and torch %s sees none" % torch.__version__)'
	$(GPU_PYTHON) -m loraplex env
	$(GPU_PYTHON) -m pytest -q --ignore tests/compile $$($(PYTHON) -c 'import xdist' 2>/dev/null && printf -- "-n $(GPU_WORKERS) --dist worksteal") $(ARGS)
	$(GPU_PYTHON) -m loraplex check --json $(RESULTS)/check.json

.PHONY: gpu-bench
gpu-bench:
	$(GPU_PYTHON) -m loraplex bench steps --json $(RESULTS)/steps.json --plot $(RESULTS)/steps.png

.PHONY: clean
clean:  ## remove caches and build output (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .triton
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
