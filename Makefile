# make demo   the main job on real weights, on a CPU (MODEL=hub-id-or-directory for another model, FAST=1 for a short form)
# make test   lint, types, tests, and the short demo
# Both set up .venv when it is missing; they need Python >= 3.10 with venv, a C compiler and PyPI.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU: the CPU build of torch (an unpinned torch would pull gigabytes of CUDA); Triton's
# interpreter needs numpy before 2.4. Where torch brings no Triton, the one that registers and spills are recorded with.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo "torch==2.13.0 'numpy<2.4'")
TRITON ?= triton==3.6.0
MODEL ?=
FAST ?=

.PHONY: demo test lint types unit clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(FAST),--fast)

# The short demo comes first: it fetches the real weights that some tests read.
test: lint types
	$(BIN)/python examples/demo.py --fast --out demo-out/fast
	$(BIN)/pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/pyright

unit: $(VENV)/.ready
	$(BIN)/pytest

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q $(TORCH)
	test "$$(uname)" != Linux || $(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install -q "$(TRITON)"
	$(BIN)/python -m pip install -q -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) demo-out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
