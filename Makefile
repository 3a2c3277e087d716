# Everything that a checkout needs: `make run` and `make test` work on a machine that has only Python with venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# What `make run` compares; the result is below runs/.
COMPARE   ?= rounds=80 --seeds 0,1,2,3,4 --algorithms c2dfb,c2dfb_nc,madsbo,mdbo
# What `make run` then runs on Ray actors: short work runs in one process otherwise (engine auto).
ON_RAY    ?= name=on-ray rounds=20 engine=ray
# Added to pytest's own options, e.g. make test TEST_ARGS="-k wire -x".
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install run test test-all test-slow test-outages check docs faults clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

install: $(STAMP)  ## create the virtual environment in .venv, or update it

run: $(STAMP)  ## compare four algorithms on the embedded digits data with five seeds, then one on Ray actors; results are in runs/
	$(BIN)/dbo compare $(COMPARE)
	$(BIN)/dbo run $(ON_RAY)

test: $(STAMP)  ## run the fast tests
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow and not outage" $(TEST_ARGS)

test-slow: $(STAMP)  ## run the slow tests, and property tests with random examples
	HYPOTHESIS_PROFILE=explore $(BIN)/pytest -n 2 --dist loadgroup -m "slow or property" $(TEST_ARGS)

test-outages: $(STAMP)  ## run the tests that stop or kill Ray's own processes during training, alone: about 15 minutes
	$(BIN)/pytest -m outage $(TEST_ARGS)

test-all: test test-slow test-outages  ## run all tests

faults: $(STAMP)  ## run the fault harness, one to two hours
	$(BIN)/python -m tests.faults

check: $(STAMP)  ## run before each commit: ruff, mypy, and the fast tests without Ray
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest -m "not ray and not slow and not outage" $(TEST_ARGS)

docs: $(STAMP)  ## build the documentation into docs/_build/html; offline, a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean:  ## remove .venv, build products and caches; runs/ stays
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so a failed installation is repeated. A virtual environment without pip is incomplete: it is
# created again.
$(STAMP): pyproject.toml
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dbo needs Python 3.11 or later: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing into $(VENV), a few minutes the first time"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@
