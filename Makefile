# What a fresh machine needs: GNU make, bash, Python 3.10 to 3.13 with its headers, a C++17 compiler, and PyPI.
#   make demo                        set up, then train a small GPT with stock FSDP2 and with TIDE, and compare
#   make test                        set up, then all checks and tests
#   make test TORCH=torch==2.12.0    the same with another torch
#   make demo PYTHON=python3.12      the same with another Python

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DEFAULT_GOAL := help

TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
EXTRAS := lightning,plots,dev
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# Absolute, so that these are the environment's own whatever is active in the caller's shell.
PY := $(abspath $(BIN))/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
NATIVE := CMakeLists.txt $(wildcard csrc/*) $(wildcard cmake/*)

# One stamp per step of the set-up: a step runs again only when what it depends on has changed. The name of torch's
# stamp holds the release asked for, so that another TORCH replaces the one installed.
STAMP_VENV := $(VENV)/.made
STAMP_TORCH := $(VENV)/.installed-$(subst /,_,$(TORCH))
STAMP_PACKAGE := $(VENV)/.installed-package

.PHONY: help setup demo test lint bench clean distclean

help: ## Say what there is to make
	@echo "Targets:"
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "Variables: TORCH=$(TORCH)  PYTHON=$(PYTHON)  VENV=$(VENV)  PYTEST_ARGS=$(PYTEST_ARGS)"

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
	@$(PIP) install '$(TORCH)'
	@rm -f $(VENV)/.installed-torch* $(STAMP_PACKAGE)
	@touch '$@'

$(STAMP_PACKAGE): $(STAMP_TORCH) pyproject.toml $(NATIVE)
	@$(PY) -c 'import shutil, os, sys; sys.exit(not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))))' || { \
	  echo "The native core needs a C++17 compiler, and none was found (c++, g++, clang++, or CXX=...)." >&2; exit 1; }
	@echo "==> Building the native core and installing tide-strategies with its extras ($(EXTRAS))"
	@$(PIP) install --editable '.[$(EXTRAS)]' '$(TORCH)'
	@touch '$@'

demo: setup ## Train a small GPT with stock FSDP2 and with TIDE; results in demo_output/
	@echo "==> Running the demo"
	@$(PY) -m tide_strategies.cli.demo --output demo_output

test: lint ## Check style and types, then run all tests
	@echo "==> Running the tests"
	@$(PY) -m pytest $(PYTEST_ARGS)

lint: setup ## Check style (ruff) and types (mypy)
	@echo "==> Checking style and types"
	@$(PY) -m ruff check .
	@# Newer ruff formats code inside Markdown as well; there, comments are aligned by hand.
	@$(PY) -m ruff format --check --exclude '*.md' .
	@$(PY) -m mypy

bench: setup ## Measure the collectives on this machine's CPU
	@$(BIN)/tide bench collectives --device cpu

clean: ## Remove what was built, caches and the demo's results
	rm -rf build dist demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## Remove the environment too
	rm -rf $(VENV)
