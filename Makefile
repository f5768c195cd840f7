# `make` lists the targets. Everything runs in .venv, which the first target that needs it sets up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
PYTEST := $(BIN)/python -m pytest
TWO := -n 2 --dist worksteal
# The package as one folder of links, for tools that read sources without importing them: mypy and mkdocstrings.
PACKAGE := build/package/drafthead
ONE_FOLDER := rm -rf $(PACKAGE) && mkdir -p $(PACKAGE) && \
  ln -s $(addprefix ../../../,data eval models recipes train $(wildcard drafthead/*)) $(PACKAGE)
# Containers often set this variable; without cached bytecode every process compiles torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-slow test-engines test-accelerator test-deps test-oldest test-newest test-next check docs coverage hooks demo clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(READY) ## create .venv with the pinned dependencies (PYTHON=python3.12 selects the interpreter)

# torch is installed first and alone, so that an installed or configured build (CPU or CUDA) is kept. --no-compile:
# Python compiles what is imported; compiling every file would double the time of pip.
$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "drafthead needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1); try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== setting up $(VENV) with the pinned dependencies"; started=$$(date +%s); \
	  $(PYTHON) -m venv $(VENV) && \
	  $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" && \
	  $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[train,dev]' && \
	  echo "   set-up: $$(($$(date +%s) - started)) s"
	@touch $@

# Apart from the set-up of a first run, which does not need them.
$(DOCS_READY): $(READY)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

test: $(READY) ## run the fast tests
	$(PYTEST) -m "not slow and not gpu and not engines" $(TWO)

test-slow: $(READY) ## run the tests that take longer or need the embedded model
	$(PYTEST) -m "slow and not gpu and not engines" $(TWO)

test-engines: $(READY) ## test with a real llama.cpp and a real vLLM, installed on first use
	$(BIN)/drafthead engines install=llamacpp
	$(BIN)/drafthead engines install=vllm
	$(PYTEST) -m engines

test-accelerator: $(READY) ## test every device path on a simulated GPU; needs g++
	PYTHONPATH=tests $(PYTEST) -p accelerator.simulated tests/accelerator/cases.py tests/accelerator/cases_runs.py $(TWO)

test-deps: test-oldest test-newest ## run core tests with the oldest and the newest versions that pyproject.toml allows

# Each in an environment of its own. uv only resolves, because pip cannot choose the oldest versions; pip installs, so
# that its configuration chooses the build of torch. test-next: with newer versions than pyproject.toml allows.
DEPS := build/deps
CORE := $(addprefix tests/,models/base models/cache models/decoding models/drafters/test_custom_generate.py models/kernels \
  commands/test_generate.py hub/test_hub.py train/test_estimate.py train/test_run.py train/tracking test_api.py test_cli.py)
test-oldest test-newest test-next: test-%:
	$(PYTHON) -m venv --clear $(DEPS)/$*
	cd $(DEPS)/$* && $(if $(filter oldest,$*),bin/python -m pip install -q --disable-pip-version-check uv && \
	  bin/uv pip compile -q --python bin/python --resolution lowest-direct --extra train $(CURDIR)/pyproject.toml -o versions.txt,touch versions.txt)
	cd $(DEPS)/$* && bin/python -m pip install -q --no-compile --disable-pip-version-check -c versions.txt -e '$(CURDIR)[train]' \
	  pytest pytest-xdist hypothesis tensorboard
	$(if $(filter next,$*),$(DEPS)/$*/bin/python -m pip install -q -U torch transformers)
	$(DEPS)/$*/bin/python -m pip list
	$(DEPS)/$*/bin/python -m pytest -q -m "not slow and not gpu and not engines" $(TWO) $(CORE)

check: $(READY) $(DOCS_READY) ## ruff, format, mypy, spelling, links and the fast tests; must pass before every commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(ONE_FOLDER)
	cd $(PACKAGE)/.. && ../../$(BIN)/mypy --config-file ../../pyproject.toml
	cd $(PACKAGE)/.. && ../../$(BIN)/mypy --config-file ../../pyproject.toml ../../benchmarks/*.py
	$(BIN)/codespell
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory test

docs: $(DOCS_READY) ## build the site into build/site; a broken link or anchor is an error
	@$(ONE_FOLDER)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

coverage: $(READY) ## run the fast tests and report the source lines they reach
	$(BIN)/coverage run -m pytest -m "not slow and not gpu and not engines"; failed=$$?; \
	  $(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered; exit $$failed

hooks: $(READY) ## install pre-commit hooks: ruff, format and mypy
	$(BIN)/pre-commit install

# Fewer answers and steps than in the recipe, so that the demo takes less than eight minutes on a new machine.
DEMO := data.text.max_tokens=6000 phases.pretrain.steps=8 phases.distill.max_tokens=28000 phases.distill.steps=100 validate_every=200 eval.max_new_tokens=48

demo: $(READY) ## train, evaluate and time Medusa heads on a real model, on a CPU
	$(BIN)/python train/run.py recipe=medusa_smollm2 $(DEMO)

clean: ## remove .venv, build files and tool caches; keep outputs/ and the download cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
