# Each target sets up what it needs, from nothing but Python 3.11, pip, make and a C++ compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check format

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# PyTorch comes first and pinned: a looser request would fetch its CUDA build.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(READY) ## a short tour of what is here, with pictures in demo/
	$(BIN)/python examples/tour.py

check: $(READY) ## format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright

test: check ## all that CI runs
	$(BIN)/python -m pytest

format: $(READY) ## rewrite the sources as `check` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
