# make test: everything that must hold before a change goes in.  make demo: watch Ebbtide do its job.
# Both begin by building .venv; after that they start at once, until python/pyproject.toml changes.

PYTHON ?= python3
# On Linux the index's plain torch may bring gigabytes of CUDA. Any pip arguments may stand here, e.g.
#   make test TORCH="torch==2.13.0 --index-url ADDRESS_OF_AN_INDEX_OF_CPU_WHEELS"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := python compat plugins test bench examples docs/site.py
# All, or some: make tests TESTS=test/srt/test_config.py
TESTS := test
# Much of a test's time is waiting for an engine: six at a time keep two cores busy.
WORKERS ?= 6
# How many sequences `make fuzz` tries; the gate tries 200 of them.
FUZZ_SEQUENCES ?= 50000
# How long `make soak` goes on, and further arguments, e.g. SOAK_OPTIONS="--device cuda --streams 64"
SOAK_MINUTES ?= 30
SOAK_OPTIONS ?=
# The Python of the GPU targets: that of .venv, or another one that has everything, e.g. GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_INSTALLED := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed-cuda)
PYTEST := $(BIN)/pytest -c python/pyproject.toml --rootdir=. --quiet
GPU_PYTEST := PYTHONPATH=python $(GPU_PYTHON) -m pytest -c python/pyproject.toml --rootdir=. --quiet --timeout=600
# Starts of engines take most of the time of the tests on several GPUs; more than two at a time slow each other.
GPU_WORKERS ?= 2
# What measures the memory of whole GPUs, and so has to be alone on them.
GPU_ALONE := test/srt/e2e/test_cuda_two_gpus.py
GPU_BENCHMARKS := throughput occupation update_default rollout start parity
PIP := $(BIN)/pip install -qq --no-compile --disable-pip-version-check
# Hundreds of processes import the same modules: each would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# For all benchmarks, e.g. make bench-gpu BENCH_OPTIONS="--runs 5"
BENCH_OPTIONS ?=
RUFF := $(BIN)/ruff
RUFF_OPTIONS := --config python/pyproject.toml

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test static tests unit contract processes format-check lint types imports fuzz soak format demo docs wheel test-plugins test-vllm-names test-tinker clean test-gpu test-multi-gpu bench-gpu

help:
	@echo "make test     formatting, lint, types, import order, tests"
	@echo "make unit     the tests that start no process; make contract, make processes: the others"
	@echo "make demo     a small model learns addition; writes demo_out/report.html"
	@echo "make test-plugins  verl drives an engine through plugins/ebbtide-verl, and by its SGLang rollout"
	@echo "make test-vllm-names  TRL, OpenRLHF and SkyRL use a server or an engine, without a vLLM wheel"
	@echo "make test-tinker  SkyRL's Tinker server trains adapters, and samples from an engine"
	@echo "make wheel    dist/ebbtide-….whl"
	@echo "make docs     the documentation as a site, in site/; the gate builds it too, to check its links"
	@echo "make fuzz     50,000 random sequences of control requests (FUZZ_SEQUENCES)"
	@echo "make soak     a server under a storm of control requests for 30 minutes (SOAK_MINUTES)"
	@echo "make test-gpu what needs a CUDA GPU, and the end-to-end tests on it"
	@echo "make test-multi-gpu  what needs two CUDA GPUs or more, and the contract's sequences on them"
	@echo "make bench-gpu  the figures of docs/performance.md, on a CUDA GPU"
	@echo "make format   format the sources and apply the safe fixes"
	@echo "make clean    remove .venv and what the tools left behind"

$(INSTALLED): python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which: make test PYTHON=python3.11" >&2; exit 1; }
	@echo "installing into $(VENV) (minutes the first time)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip || echo "pip stays as it is: an old one takes longer"
	@$(PIP) $(TORCH)
	@echo "torch is there; now what Ebbtide and its tests need"
	@# Python compiles what it imports: most of torch's share is done while pip takes the other core.
	@$(BIN)/python -W ignore -c "import torch.distributed.tensor" & $(PIP) --editable "python[dev,demo,docs,router]" \
		|| { echo "without sglang-router, then: its tests are skipped"; $(PIP) --editable "python[dev,demo,docs]"; }
	@touch $@

install: $(INSTALLED)

# What reads the sources runs beside the tests: these are collected on one core, and wait much of their time.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 tests static
	@echo "all good"

static: format-check lint types imports docs

format-check: $(INSTALLED)
	@echo "ruff format"
	@$(RUFF) format $(RUFF_OPTIONS) --check --quiet --diff $(SOURCES)

lint: $(INSTALLED)
	@echo "ruff check"
	@$(RUFF) check $(RUFF_OPTIONS) --quiet $(SOURCES)

types: $(INSTALLED)
	@echo "mypy --strict"
	@cd python && $(BIN)/mypy --no-error-summary
	@cd python && MYPYPATH=../compat $(BIN)/mypy --no-error-summary --strict ../compat/sglang
	@cd python && MYPYPATH=../compat/vllm-names $(BIN)/mypy --no-error-summary --strict ../compat/vllm-names/vllm
	@# No test runs these. Behind the others: what they import is read by then.
	@cd python && MYPYPATH=../bench $(BIN)/mypy --no-error-summary ../bench/*.py

imports: $(INSTALLED)
	@echo "lint-imports"
	@cd python && $(BIN)/lint-imports --no-logo

# A link that leads nowhere, or a page that no list has, is an error. Quiet, mkdocs would not count them.
docs: $(INSTALLED)
	@echo "mkdocs build"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict > $(VENV)/docs.log 2>&1 \
		|| { grep -v '^INFO' $(VENV)/docs.log; exit 1; }

tests: TIER := unit or contract or processes
unit: TIER := unit
contract: TIER := contract
processes: TIER := processes

tests unit contract processes: $(INSTALLED)
	@echo "pytest: $(TIER)"
	@$(PYTEST) --durations=10 --workers $(WORKERS) -m "$(TIER)" $(TESTS)

$(VENV)/.installed-cuda: $(INSTALLED)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable "python[dev,demo,cuda]"
	@touch $@

# The end-to-end tests run twice on the GPU: by their exact comparisons, in float32 with torch's attention;
# and as it is served, in bfloat16 with FlashInfer and CUDA graphs, where that is what counts.
test-gpu: $(GPU_INSTALLED)
	@echo "pytest -m gpu"
	@$(GPU_PYTEST) -m "gpu and not multi_gpu" $(TESTS)
	@echo "the end-to-end tests on the GPU, in bfloat16"
	@EBBTIDE_TEST_DEVICE=cuda $(GPU_PYTEST) -m "not gpu and not multi_gpu" \
		test/srt/e2e/test_contract_sequences.py test/srt/e2e/test_memory_returned.py \
		test/srt/e2e/test_idle.py
	@echo "the end-to-end tests on the GPU, in float32"
	@EBBTIDE_TEST_DEVICE=cuda-float32 $(GPU_PYTEST) -m "not gpu and not multi_gpu" test/srt/e2e

# Two GPUs do for most of it; what needs three is skipped where there are fewer.
test-multi-gpu: $(GPU_INSTALLED)
	@echo "pytest -m multi_gpu"
	@EBBTIDE_TEST_DEVICE=cuda $(GPU_PYTEST) -m multi_gpu $(GPU_ALONE)
	@EBBTIDE_TEST_DEVICE=cuda $(GPU_PYTEST) -m multi_gpu -n $(GPU_WORKERS) --dist loadfile --durations=15 \
		--ignore=$(GPU_ALONE) test/srt/distributed test/srt/e2e test/srt/entrypoints test/trainer test/compat
	@EBBTIDE_TEST_DEVICE=cuda $(GPU_PYTEST) -m multi_gpu test/ray

bench-gpu: $(GPU_INSTALLED)
	@for name in $(GPU_BENCHMARKS); do \
		PYTHONPATH=python $(GPU_PYTHON) bench/gpu_$$name.py $(BENCH_OPTIONS) || exit 1; \
	done
	@PYTHONPATH=python $(GPU_PYTHON) bench/performance_page.py

fuzz: $(INSTALLED)
	@EBBTIDE_FUZZ_SEQUENCES=$(FUZZ_SEQUENCES) $(PYTEST) --timeout=0 -p no:logging test/srt \
		-k "Fuzz or nothing_makes_the_server_fail"

soak: $(INSTALLED)
	@PYTHONPATH=test:test/srt $(BIN)/python -m soak --minutes $(SOAK_MINUTES) $(SOAK_OPTIONS)

format: $(INSTALLED)
	@$(RUFF) check $(RUFF_OPTIONS) --quiet --fix $(SOURCES)
	@$(RUFF) format $(RUFF_OPTIONS) $(SOURCES)

# Of the demo alone: the developers' tools take minutes more.
$(VENV)/.installed-demo: python/pyproject.toml
	@echo "installing into $(VENV): torch, then Ebbtide and what draws the report"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --no-compile --disable-pip-version-check $(TORCH)
	@$(BIN)/pip install --no-compile --quiet --disable-pip-version-check --editable "python[demo]"
	@touch $@

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-demo)
	@$(BIN)/ebbtide demo

# In an environment of their own: verl brings a hundred packages.
test-plugins: .venv-plugins/.installed
	@.venv-plugins/bin/python -m pytest --quiet plugins/ebbtide-verl/tests

.venv-plugins/.installed: python/pyproject.toml plugins/ebbtide-verl/pyproject.toml
	@echo "installing verl and the plugin into .venv-plugins (minutes)"
	@$(PYTHON) -m venv .venv-plugins
	@.venv-plugins/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	@.venv-plugins/bin/pip install --quiet --disable-pip-version-check pytest httpx "TransferQueue>=0.1.10" cachetools \
		--editable python --editable plugins/ebbtide-verl
	@touch $@

# TRL brings seventy packages. Those of OpenRLHF and SkyRL need a GPU: what is tested needs Ray and aiohttp.
test-vllm-names: .venv-vllm-names/.installed
	@PYTHONPATH=compat/vllm-names .venv-vllm-names/bin/python -m pytest --quiet compat/vllm-names/tests

.venv-vllm-names/.installed: python/pyproject.toml
	@echo "installing TRL, OpenRLHF and SkyRL into .venv-vllm-names (minutes)"
	@$(PYTHON) -m venv .venv-vllm-names
	@.venv-vllm-names/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	@.venv-vllm-names/bin/pip install --quiet --disable-pip-version-check pytest requests aiohttp \
		"trl>=1.16,<1.17" --editable "python[ray]"
	@for one in "openrlhf>=0.11.2,<0.12" "skyrl>=0.3,<0.4"; do \
		.venv-vllm-names/bin/pip install --quiet --disable-pip-version-check --no-deps "$$one" \
			|| echo "$$one is not to be had for this Python: its test is skipped"; \
	done
	@touch $@

# SkyRL's server brings jax. Its answers are what tinker's first clients read.
test-tinker: .venv-tinker/.installed
	@.venv-tinker/bin/python -m pytest --quiet compat/tinker

.venv-tinker/.installed: python/pyproject.toml
	@echo "installing SkyRL's Tinker server into .venv-tinker (minutes)"
	@$(PYTHON) -m venv .venv-tinker
	@.venv-tinker/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	@.venv-tinker/bin/pip install --quiet --disable-pip-version-check pytest requests uv \
		"skyrl[tinker,jax]>=0.3,<0.4" "tinker>=0.3,<0.4" --editable python
	@touch $@

wheel: $(INSTALLED)
	@$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./python
	@ls dist/*.whl

clean:
	rm -rf $(VENV) .venv-plugins .venv-vllm-names .venv-tinker demo_out dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	cd python && rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
