# Each target sets up what it needs, from nothing but Python 3.11, pip, make and a C++ compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# One thread for each test process: two processes with two threads each would wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

.PHONY: help demo test check coverage bench format

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# PyTorch comes first and pinned: a looser request would fetch its CUDA build.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[test]'
	touch $@

$(BENCH_READY): $(READY)
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(READY) ## a short tour of what is here, with pictures in demo/
	$(BIN)/python examples/tour.py

check: $(READY) ## format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright

test: check ## all that CI runs
	$(PYTEST)

coverage: $(READY) ## the tests once more, with the lines that none of them reaches
	$(PYTEST) --cov=src/tidegate --cov-report=term-missing:skip-covered

bench: $(BENCH_READY) ## layers beside their peers, as ratios; tables in benchmarks/results/. Run nothing else meanwhile
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/jax_layers.py

format: $(READY) ## rewrite the sources as `check` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
