# What a fresh machine needs: GNU make, bash, Python 3.10 to 3.13 with its headers, a C++17 compiler, and PyPI.
#   make demo                        set up, then train a small GPT with stock FSDP2 and with TIDE, and compare
#   make test                        set up, then all checks and tests
#   make test TORCH=torch==2.12.0    the same with another torch
#   make demo PYTHON=python3.12      the same with another Python
# On a machine with GPUs: make test-gpu, make sanitize-gpu, make bench-gpu.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DEFAULT_GOAL := help

TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
EXTRAS := lightning,accelerate,transformers,hydra,plots,dev
PYTEST_ARGS ?=
# Tests that bound times, or measure.
TIMED := $(patsubst %,tests/cpu/test_%.py,arena autopsy exchange failures step_peak teardown)

BIN := $(VENV)/bin
# Absolute, so that these are the environment's own whatever is active in the caller's shell.
PY := $(abspath $(BIN))/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Of the modules installed, few are ever imported; Python compiles those when they are.
INSTALL := $(PIP) install --no-compile
NATIVE := CMakeLists.txt $(wildcard csrc/*) $(wildcard cmake/*)

# One stamp per step of the set-up: a step runs again only when what it depends on has changed. The name of torch's
# stamp holds the release asked for, so that another TORCH replaces the one installed.
STAMP_VENV := $(VENV)/.made
STAMP_TORCH := $(VENV)/.installed-$(subst /,_,$(TORCH))
STAMP_PACKAGE := $(VENV)/.installed-package
STAMP_DOCS := $(VENV)/.installed-docs

# GPU machines bring their own Python with torch and the build tools (scikit-build-core, nanobind, cmake, ninja, pytest,
# triton): nothing is fetched, and the package goes into a folder of its own.
PYTHON_GPU ?= python3
GPU_PACKAGE := $(abspath build/gpu-package)
BENCHMARKS ?= collectives step interference sweep
BENCH_OUTPUT := $(abspath bench_output)

.PHONY: help setup demo test test-all run-tests lint docs bench gpu-package test-gpu sanitize-gpu bench-gpu clean distclean

help: ## Say what there is to make
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "Variables: TORCH=$(TORCH)  PYTHON=$(PYTHON)  VENV=$(VENV)  PYTEST_ARGS=$(PYTEST_ARGS)"
	@echo "           PYTHON_GPU=$(PYTHON_GPU)  BENCHMARKS='$(BENCHMARKS)'"

setup: $(STAMP_PACKAGE) ## Create the environment and install the package into it, editable

$(STAMP_VENV):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "This needs Python 3.10 to 3.13, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=..." >&2; exit 1; }
	@echo "==> Creating a Python environment in $(VENV)"
	@# Debian's Python comes without ensurepip; then the environment gets pip from the pip outside.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(PY) install --quiet pip; }
	@touch '$@'

$(STAMP_TORCH): $(STAMP_VENV)
	@echo "==> Installing $(TORCH) (a large download on a fresh machine)"
	@$(INSTALL) '$(TORCH)'
	@rm -f $(VENV)/.installed-torch* $(STAMP_PACKAGE)
	@touch '$@'

$(STAMP_PACKAGE): $(STAMP_TORCH) pyproject.toml $(NATIVE)
	@$(PY) -c 'import shutil, os, sys; sys.exit(not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))))' || { \
	  echo "The native core needs a C++17 compiler, and none was found (c++, g++, clang++, or CXX=...)." >&2; exit 1; }
	@echo "==> Building the native core and installing tide-strategies with its extras ($(EXTRAS))"
	@$(INSTALL) --editable '.[$(EXTRAS)]' '$(TORCH)'
	@touch '$@'

demo: setup ## Train a small GPT with stock FSDP2 and with TIDE; results in demo_output/
	@echo "==> Running the demo"
	@$(PY) -m tide_strategies.cli.demo --output demo_output

test: lint run-tests ## Check style and types, then run the tests

run-tests: setup # (side by side with lint under make -j)
	@echo "==> Running the tests"
	@# Two files at a time, the slowest first; what bounds times, or measures, alone. 5: PYTEST_ARGS chose none.
	@$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TIMED:%=--ignore %) tests $(PYTEST_ARGS) || \
	  [ $$? = 5 -a -n "$(PYTEST_ARGS)" ]
	@$(PY) -m pytest $(TIMED) $(PYTEST_ARGS) || [ $$? = 5 -a -n "$(PYTEST_ARGS)" ]

test-all: PYTEST_ARGS += --all
test-all: test ## The same with every case of what test shows for a part

lint: setup ## Check style (ruff) and types (mypy)
	@echo "==> Checking style and types"
	@$(PY) -m ruff check .
	@# Newer ruff formats code inside Markdown as well; there, comments are aligned by hand.
	@$(PY) -m ruff format --check --exclude '*.md' .
	@$(PY) -m mypy

docs: $(STAMP_DOCS) ## Build the documentation site into build/site; a broken link is an error
	@echo "==> Building the documentation"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

$(STAMP_DOCS): $(STAMP_PACKAGE)
	@echo "==> Installing the tools of the documentation"
	@$(INSTALL) 'tide-strategies[docs]'
	@touch '$@'

bench: setup ## Measure the collectives on the CPU
	@$(BIN)/tide bench collectives --device cpu

gpu-package:
	@echo "==> Building the package for $(PYTHON_GPU) into $(GPU_PACKAGE)"
	@$(PYTHON_GPU) -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps --upgrade \
	  --target $(GPU_PACKAGE) .

# Both run from the package's folder: in the repository, Python would find the sources without the native core.
test-gpu: gpu-package ## Run the GPU tests with PYTHON_GPU, on one card or many
	@cd $(GPU_PACKAGE) && $(PYTHON_GPU) -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider \
	  $(CURDIR)/tests/gpu $(PYTEST_ARGS)

sanitize-gpu: gpu-package ## Run the tests of the GPU kernels under compute-sanitizer (memcheck, racecheck)
	@cd $(GPU_PACKAGE); for tool in memcheck racecheck; do \
	  echo "==> compute-sanitizer --tool $$tool"; \
	  compute-sanitizer --tool $$tool --error-exitcode 9 $(PYTHON_GPU) -m pytest -c $(CURDIR)/pyproject.toml \
	    --rootdir $(CURDIR) -p no:cacheprovider $(CURDIR)/tests/gpu/test_kernels_*.py $(PYTEST_ARGS); \
	done

bench-gpu: gpu-package ## Run the benchmarks on GPUs with PYTHON_GPU; results in bench_output/
	@mkdir -p $(BENCH_OUTPUT)
	@cd $(GPU_PACKAGE); failed=; for name in $(BENCHMARKS); do \
	  case $$name in step) bench="step --trace";; sweep) bench="step --sweep";; *) bench=$$name;; esac; \
	  echo "==> tide bench $$bench"; \
	  $(PYTHON_GPU) -m tide_strategies.cli.main bench $$bench --device cuda --json $(BENCH_OUTPUT)/$$name.json \
	    --plot $(BENCH_OUTPUT)/$$name.png 2>&1 | tee $(BENCH_OUTPUT)/$$name.txt || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "Failed, wholly or in part:$$failed" >&2; exit 1; fi

clean: ## Remove what was built, caches and the demo's results
	rm -rf build dist demo_output bench_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## Remove the environment too
	rm -rf $(VENV)
