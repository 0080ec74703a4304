# Each target sets up what it needs, from nothing but Python 3.11, pip, make and a C++ compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
BENCH_READY := $(VENV)/.ready-bench
DOCS_READY := $(VENV)/.ready-docs
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# uv takes 30 s where pip takes 200; pip reads settings that uv does not, such as another index, and so comes second.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[$(1)]' \
	|| $(PIP) --editable '.[$(1)]'
unexport PYTHONDONTWRITEBYTECODE
# Targets that do not need one another, such as `check` and `bytecode`, run side by side.
MAKEFLAGS += --jobs=2
# One thread for each test process: two processes with two threads each would wait for one another. A file stays in one
# process, as its fixtures and what it compiles do; the slowest files come first (tests/conftest.py). The time of each
# test is in build/tests.xml.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
	--durations 10 --junitxml build/tests.xml

.PHONY: help demo tour chromium bytecode test test-all torture models check coverage bench bench-gpu dist docs format

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# PyTorch comes first and pinned: a looser request would fetch its CUDA build.
$(DEMO_READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile torch uv
	$(call INSTALL,lab)
	touch $@

$(READY): $(DEMO_READY)
	$(call INSTALL,test)
	touch $@

$(BENCH_READY): $(READY)
	$(call INSTALL,dev)
	touch $@

$(DOCS_READY): $(DEMO_READY)
	$(call INSTALL,docs)
	touch $@

demo: $(DEMO_READY) ## the main job: compare gates on Python's own sources; the page is demo/report.html
	$(BIN)/tidegate compare --out demo

tour: $(DEMO_READY) ## a short tour of the mathematics, with pictures in tour/
	$(BIN)/python examples/tour.py

check: $(READY) ## format, lint, phrases and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/python tests/support/phrases.py
	$(BIN)/basedpyright

# The page's tests open it in a browser; where none can be installed they are skipped, and say so.
chromium:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 \
		|| echo "No chromium, and it cannot be installed here: the browser tests will be skipped."

# Else each test process would compile the packages for itself. Some hold files that are not Python 3.
bytecode: $(READY)
	-@$(BIN)/python -m compileall -qq $(VENV)/lib

test: check bytecode chromium ## all that CI runs: every law over every gate, and covers of the long products
	$(PYTEST) -r s

test-all: check bytecode chromium ## the whole products of gates, options, dtypes and masks, and JAX fully optimised
	$(PYTEST) -r s --full

# One process: it measures memory and time, and kills what it starts.
torture: $(READY) chromium ## every fault of tests/faults at full length; writes the table of docs/reliability.md
	rm -f build/faults.jsonl && mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults --torture --outcomes build/faults.jsonl -r s --timeout 3600
	$(BIN)/python tests/support/faults.py build/faults.jsonl

models: $(READY) ## every causal model type of transformers, gated and observed; writes the table of docs/models-supported.md
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/support/supported_models.py

coverage: $(READY) ## the tests once more, with the lines that none of them reaches
	$(PYTEST) --cov=src/tidegate --cov-report=term-missing:skip-covered

bench: $(BENCH_READY) ## layers beside their peers, as ratios; tables in benchmarks/results/. Run nothing else meanwhile
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/windows.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/jax_layers.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/observe.py
	$(BIN)/python benchmarks/curvature.py
	$(BIN)/python benchmarks/experts.py

bench-gpu: $(BENCH_READY) ## the tests that need a GPU, then layers and training on it; the table is benchmarks/results/gpu.md
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py

dist: $(READY) ## wheel and source archive in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# A warning fails it: a formula that cannot be set, a link or a heading that is not there, a page that no list names.
docs: $(DOCS_READY) ## the site, of these documents and of the docstrings: site/index.html, readable without a network
	rm -rf site
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs -d build/doctrees . site
	$(BIN)/python docs/_site/check_links.py site

format: $(READY) ## rewrite the sources as `check` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
