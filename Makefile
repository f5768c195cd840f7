# `make` lists the targets. Everything runs in .venv, which the first target that needs it sets up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
TWO := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-slow test-engines check coverage hooks demo clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(READY) ## make .venv with the pinned dependencies (PYTHON=python3.12 chooses the interpreter)

# torch comes first and by itself, so that an installed or configured build (CPU or CUDA) is the one that is kept. Python
# compiles what is imported: all of it beforehand takes pip as long again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "drafthead needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1); try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== setting up $(VENV) with the pinned dependencies"; started=$$(date +%s); \
	  $(PYTHON) -m venv $(VENV) && \
	  $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" && \
	  $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]' && \
	  echo "   set-up: $$(($$(date +%s) - started)) s"
	@touch $@

test: $(READY) ## the fast tests
	$(PYTEST) -m "not slow and not gpu and not engines" $(TWO)

test-slow: $(READY) ## the tests that take longer or need the embedded model
	$(PYTEST) -m "slow and not gpu and not engines" $(TWO)

test-engines: $(READY) ## a real llama.cpp serves a head, a real vLLM writes a corpus; both installed on first use
	$(BIN)/drafthead engines install=llamacpp
	$(BIN)/drafthead engines install=vllm
	$(PYTEST) -m engines

check: $(READY) ## lint, format, types, fast tests: what must be green before a commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

coverage: $(READY) ## the fast tests, and which lines of the source they reach
	$(BIN)/coverage run -m pytest -m "not slow and not gpu and not engines"; failed=$$?; \
	  $(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered; exit $$failed

hooks: $(READY) ## lint, format and types before every commit (pre-commit)
	$(BIN)/pre-commit install

# Fewer answers to read and fewer steps than the recipe has, for eight minutes from an empty machine.
DEMO := data.text.max_tokens=6000 phases.pretrain.steps=8 phases.distill.max_tokens=28000 phases.distill.steps=100 validate_every=200 eval.max_new_tokens=48

demo: $(READY) ## train, evaluate and time Medusa heads on a real model, on a CPU
	$(BIN)/python train/run.py recipe=medusa_smollm2 $(DEMO)

clean: ## remove .venv, build leftovers and tool caches; outputs/ and the download cache stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
