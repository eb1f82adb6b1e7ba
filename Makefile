# make test: everything that must hold before a change goes in.  make demo: watch Ebbtide do its job.
# Both begin by building .venv; after that they start at once, until python/pyproject.toml changes.

PYTHON ?= python3
# On Linux the index's plain torch may bring gigabytes of CUDA. Any pip arguments may stand here, e.g.
#   make test TORCH="torch==2.13.0 --index-url ADDRESS_OF_AN_INDEX_OF_CPU_WHEELS"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := python test bench examples
# All, or some: make unit TESTS=test/srt/test_config.py
TESTS := test
# How many sequences `make fuzz` tries; about 80 a second on one core.
FUZZ_SEQUENCES ?= 50000
RUFF := $(BIN)/ruff
RUFF_OPTIONS := --config python/pyproject.toml

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test format-check lint types imports unit fuzz format demo clean

help:
	@echo "make test     formatting, lint, types, import order, tests"
	@echo "make demo     a small model learns addition; writes demo_out/report.html"
	@echo "make fuzz     50,000 random sequences of control requests (FUZZ_SEQUENCES)"
	@echo "make format   format the sources and apply the safe fixes"
	@echo "make clean    remove .venv and what the tools left behind"

$(INSTALLED): python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which: make test PYTHON=python3.11" >&2; exit 1; }
	@echo "installing into $(VENV) (minutes the first time)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable "python[dev,demo]"
	@touch $@

install: $(INSTALLED)

test: format-check lint types imports unit
	@echo "all good"

format-check: $(INSTALLED)
	@echo "ruff format"
	@$(RUFF) format $(RUFF_OPTIONS) --check --quiet --diff $(SOURCES)

lint: $(INSTALLED)
	@echo "ruff check"
	@$(RUFF) check $(RUFF_OPTIONS) --quiet $(SOURCES)

types: $(INSTALLED)
	@echo "mypy --strict"
	@cd python && $(BIN)/mypy --no-error-summary

imports: $(INSTALLED)
	@echo "lint-imports"
	@cd python && $(BIN)/lint-imports --no-logo

unit: $(INSTALLED)
	@echo "pytest"
	@$(BIN)/pytest -c python/pyproject.toml --rootdir=. --quiet --durations=10 $(TESTS)

fuzz: $(INSTALLED)
	@EBBTIDE_FUZZ_SEQUENCES=$(FUZZ_SEQUENCES) $(BIN)/pytest -c python/pyproject.toml --rootdir=. --quiet \
		--timeout=0 -p no:logging test/srt/managers/control/test_control_fuzz.py

format: $(INSTALLED)
	@$(RUFF) check $(RUFF_OPTIONS) --quiet --fix $(SOURCES)
	@$(RUFF) format $(RUFF_OPTIONS) $(SOURCES)

demo: $(INSTALLED)
	@$(BIN)/ebbtide demo

clean:
	rm -rf $(VENV) demo_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	cd python && rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
