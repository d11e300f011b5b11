# `make quickstart` and `make test` install what they need into .venv; a second run finds it there.
.DEFAULT_GOAL := help
.PHONY: help quickstart test lint house chaos docs lock setup clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## install everything into .venv
	@./setup.sh

quickstart: setup  ## watch a small model learn, through every real part, on two cores
	@.venv/bin/miles quickstart

test: setup  ## the five checks: ruff, formatting, pyright, import borders, pytest
	@scripts/test.sh

lint: setup  ## the checks without pytest
	@scripts/test.sh lint

house: setup  ## the size and shape of every package, now and at the start of the rebuilding
	@.venv/bin/python scripts/house.py

SEED ?= 0
SEEDS ?= 1
# CONFIG="@ my.toml" plays the limits of a configuration, JSON=1 prints a line of JSON for each seed.
chaos: setup  ## break scripted runs on purpose: make chaos SEEDS=200, or SEED=7 to play one again
	@PYTHONPATH=tests:packages/miles-core/tests .venv/bin/python -m chaos --seed $(SEED) --seeds $(SEEDS) $(if $(JSON),--json) $(CONFIG)

docs: setup  ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

lock:  ## resolve uv.lock again, without addresses
	@scripts/lock.sh

clean:  ## remove build products and caches; .venv and runs/ stay
	rm -rf dist build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find packages tests -name __pycache__ -prune -exec rm -rf {} +
