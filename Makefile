# Every target sets up what it needs; a second call finds it done.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup train test test-all test-python test-cuda test-ui lint docs site ui serve serve-down bench mutants chaos simulate pins sbom advisories clean

help:
	@echo 'make train        train on the best device here:  make train ARGS="--train.epochs 5"'
	@echo 'make test         the tests, but for those of whole programs: some four minutes'
	@echo 'make test-all     all that need no GPU and no browser: a quarter of an hour'
	@echo 'make test-python  the tests that differ with Python, on another: NEWER=python3.13'
	@echo 'make test-cuda    the tests that need a CUDA device; CUDA_RUN=... names a command that brings one'
	@echo 'make test-ui      the tests of MLflow pages in a browser that is here; PICTURES=docs writes those of the README'
	@echo 'make ui           the runs in MLflow, at the address that it prints'
	@echo 'make serve        Prefect server, worker, schedules and MLflow on this machine'
	@echo 'make serve-down   end exactly those'
	@echo 'make lint         formatter, linter, type checker'
	@echo 'make docs         what the pages show of the code, written anew: rooms, settings, names'
	@echo 'make site         the pages as a site that needs no network, in site/'
	@echo 'make bench        the benchmarks'
	@echo 'make chaos        trainings and runs killed, damaged, doubled by the hundred: an hour'
	@echo 'make pins         the hashes of all that is installed, written anew after a change of constraints.txt'
	@echo 'make advisories   known advisories of what is pinned, as the package index has them'
	@echo 'make sbom         the wheel in dist/, and the list of what it is made of (CycloneDX)'
	@echo 'make simulate     a million simulated histories of the record: a night; ARGS="--histories 20000", ARGS=--mutants'
	@echo 'make mutants      whether the tests notice a wrong engine: half an hour; ARGS="FILE ..." for some'

setup: .venv/.ready

.venv/.ready: pyproject.toml $(wildcard pins/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...' >&2; exit 2; }
	@echo 'Setting up .venv, once: 1 to 5 minutes and 2 GB on disk; several GB more where PyTorch brings CUDA.'
	@echo '1/3 a Python environment of its own: seconds'
	@$(PYTHON) -m venv .venv
	@echo '2/3 PyTorch, Prefect, MLflow and what they need, from the package index: minutes'
	@$(BIN)/python pins/install.py run dev
	@echo '3/3 empty databases for Prefect and MLflow, so that no run waits for them: half a minute'
	@$(BIN)/python -m headroom.services.first_use
	@touch $@

train: .venv/.ready
	$(BIN)/python -m flows.train $(ARGS)

test: .venv/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not gpu and not ui and not slow' $(ARGS)

test-all: .venv/.team .venv/.adapters .venv/.site
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# In a copy, so that this .venv stays: what is pinned, installed anew for that Python.
test-python:
	rm -rf .venv/other && mkdir -p .venv/other
	cp -r $(filter-out .venv,$(wildcard * .ci)) .venv/other
	$(MAKE) -C .venv/other test PYTHON=$(NEWER) \
	  ARGS='tests/base tests/settings tests/process tests/models tests/watch tests/run tests/test_pins.py'
	rm -rf .venv/other

test-cuda: .venv/.adapters
	$(CUDA_RUN) $(BIN)/python -m pytest -m gpu -p no:cacheprovider tests/gpu $(ARGS)

test-ui: .venv/.ui
	TESTS_PICTURES=$(PICTURES) $(BIN)/python -m pytest -m ui -p no:cacheprovider tests/ui $(ARGS)

# What drives the browser; nothing else needs it.
.venv/.ui: .venv/.ready
	$(BIN)/python pins/install.py ui
	@touch $@

lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.14

docs: .venv/.ready
	$(BIN)/python -m tests.test_house

site: .venv/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'site/index.html; to search in it: $(BIN)/python -m http.server --directory site'

# What makes the site; nothing else needs it.
.venv/.site: .venv/.ready
	$(BIN)/python pins/install.py site
	@touch $@

ui: .venv/.ready
	$(BIN)/python -m headroom.services.serve ui

serve: .venv/.ready
	$(BIN)/python -m headroom.services.serve up

serve-down: .venv/.ready
	$(BIN)/python -m headroom.services.serve down

# The frameworks that headroom/ tells of, for its tests; nothing else needs them. ultralytics lies
# apart: its torchvision is built for CUDA, and where PyTorch is not, transformers would find it.
.venv/.adapters: .venv/.ready
	$(BIN)/python pins/install.py adapters
	$(BIN)/python pins/install.py ultralytics --upgrade --target .venv/ultralytics \
	  || echo 'ultralytics cannot be had here: the tests of its adapter do not run' >&2
	@touch $@

# What asks PostgreSQL and S3, for the tests of a team's stores; nothing else needs it.
.venv/.team: .venv/.ready
	$(BIN)/python pins/install.py team
	@touch $@

bench: .venv/.adapters
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.costs
	$(BIN)/python -m benchmarks.accounts
	$(BIN)/python -m benchmarks.evaluation
	$(BIN)/python -m benchmarks.prepare
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.forecast
	$(BIN)/python -m benchmarks.compare
	$(BIN)/python -m benchmarks.distributed
	$(BIN)/python -m benchmarks.referee --nights 200
	$(BIN)/python -m benchmarks.verdict --healthy 40

mutants: .venv/.mutants
	$(BIN)/python -m tests.mutants $(ARGS)

chaos: .venv/.ready
	$(BIN)/python -m tests.chaos $(ARGS)

simulate: .venv/.ready
	$(BIN)/python -m tests.simulation $(ARGS)

# What turns the sources; nothing else needs it.
.venv/.mutants: .venv/.ready
	$(BIN)/python pins/install.py mutants
	@touch $@

pins: .venv/.supply
	.venv/supply/bin/python pins/write.py

sbom: .venv/.supply
	.venv/supply/bin/python pins/sbom.py wheel $(BIN)/python

advisories: .venv/.ready
	$(BIN)/python pins/advisories.py

# What writes hashes and lists, in an environment of its own, so that no list names it.
.venv/.supply: .venv/.ready
	$(PYTHON) -m venv .venv/supply
	.venv/supply/bin/python pins/install.py supply
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
