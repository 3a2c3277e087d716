# Everything a checkout needs: `make run` and `make test` work on a machine that has only Python with venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# What `make run` compares; the result is below runs/.
COMPARE   ?= rounds=80 --algorithms c2dfb,c2dfb_nc,madsbo,mdbo
# Added to pytest's own options, e.g. make test TEST_ARGS="-k wire -x".
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install run test check clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

install: $(STAMP)  ## make the virtual environment in .venv, or bring it up to date

run: $(STAMP)  ## compare four algorithms on the embedded digits data, ten nodes on a ring; the result is in runs/
	$(BIN)/dbo compare $(COMPARE)

test: $(STAMP)  ## every test, those on Ray in one process beside the others
	$(BIN)/pytest -n 2 --dist loadgroup $(TEST_ARGS)

check: $(STAMP)  ## what to run before each commit: ruff, mypy, and the tests that need no Ray
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest -m "not ray" $(TEST_ARGS)

clean:  ## remove .venv, build products and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an installation that fails is tried again. A virtual environment without pip is the rest
# of one that could not be finished: it is made anew.
$(STAMP): pyproject.toml
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dbo needs Python 3.11 or later: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing into $(VENV), a few minutes the first time"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@
