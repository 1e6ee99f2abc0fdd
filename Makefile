# Every target does its own set-up: a virtual environment, its packages, the
# native build. A second run finds them done.

TF ?= 2.21
TF_OF_VENV := 2.21
VENV ?= $(if $(filter $(TF_OF_VENV),$(TF)),.venv,.venv-$(TF))
TF_PACKAGE ?= $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
JOBS ?= 2
FUZZ_SECONDS ?= 10
PYTEST_ARGS ?=
EXTRAS ?= plot,dev
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null \
  && echo $$p && break; done)
ifeq ($(origin CXX),default)
CXX := $(firstword $(notdir $(shell command -v g++ clang++)) g++)
endif

ADDONS := TF=2.15 VENV=.venv-addons PYTHON=python3.11 EXTRAS=plot,dev,addons
BIN := $(VENV)/bin
READY := $(VENV)/.ready-tf-$(TF)
CPP := $(shell find custom_ops tests/native -name '*.h' -o -name '*.cc' -o -name '*.inc' 2>/dev/null)
STEP = @printf '\n==> %s\n'

.PHONY: help venv build demo bench bench-native gallery test test-all test-native test-python test-tf test-addons lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  TF=2.20 takes another TensorFlow (in a virtual environment of its own),"
	@echo "  PYTHON=python3.12 another Python, CXX=clang++ another compiler."

venv: $(READY) ## make the virtual environment, with TensorFlow $(TF)

build: $(READY) ## build the native library (it is cached per user)
	$(STEP) "native library"
	@$(BIN)/tfscale build

demo: build ## see what it does, on this machine
	$(STEP) "demo"
	@$(BIN)/tfscale demo

bench: build ## measure all-reduces on this machine
	$(STEP) "benchmark"
	@$(BIN)/tfscale bench

bench-native: ## measure the codecs
	@$(MAKE) -s --no-print-directory -C tests/native CXX=$(CXX) bench

gallery: build ## train programs of the kinds that keras.io shows, on replicas and on one device
	$(STEP) "gallery"
	@$(BIN)/python -m tests.gallery $(PROGRAMS)

test: test-native test-python ## run the tests that CI runs

test-all: test-native build ## run all tests, the full grids too (hours)
	$(STEP) "all Python tests, TensorFlow $(TF)"
	@$(BIN)/python -m pytest -m "" $(PYTEST_ARGS)

test-native: ## test and fuzz the C++ under sanitizers, without TensorFlow
	$(STEP) "native tests"
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler: sudo apt-get install g++" >&2; exit 1; }
	@$(MAKE) -s --no-print-directory -C tests/native -j$(JOBS) --output-sync=target \
	  CXX=$(CXX) FUZZ_SECONDS=$(FUZZ_SECONDS) check

test-python: build ## run the Python tests (PYTEST_ARGS="-k ring" for some)
	$(STEP) "Python tests, TensorFlow $(TF)"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-tf: build ## run what depends on TensorFlow, quickly: make test-tf TF=2.20
	$(STEP) "tests of ops and strategy, TensorFlow $(TF)"
	@$(BIN)/python -m pytest -m "not slow and not full" tests/ops tests/integration tests/strategy $(PYTEST_ARGS)

test-addons: ## test with TensorFlow 2.15, Keras 2 and tensorflow-addons (needs python3.11)
	@$(MAKE) --no-print-directory $(ADDONS) build
	$(STEP) "tests of ops, strategy and optimizers, tensorflow-addons"
	@.venv-addons/bin/python -m pytest -m "not slow and not full" tests/ops tests/addons $(PYTEST_ARGS)

lint: $(READY) ## check style and types
	$(STEP) "lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(READY) ## format all files
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

clean: ## remove all that make has made here
	rm -rf build dist .venv .venv-* *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Debian and Ubuntu put venv's copy of pip into a package of its own. Where that
# is missing, it is unpacked here, without being installed.
$(BIN)/pip:
	$(STEP) "virtual environment $(VENV)"
	@test -n "$(PYTHON)" || { echo "tfscale needs Python 3.10 to 3.13; there is none on PATH." \
	  "Install one (sudo apt-get install python3), or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
	  echo "python3-venv is not installed; fetching pip from the distribution"; \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && cd $(VENV) \
	  && { [ "$$(id -u)" != 0 ] || apt-get update -qq || true; } \
	  && apt-get -o APT::Sandbox::User=root download -qq python3-pip-whl && dpkg-deb -x python3-pip-whl_*.deb pip-wheel \
	  && bin/python $$(ls $$PWD/pip-wheel/usr/share/python-wheels/pip-*.whl)/pip install -q pip \
	  && rm -rf pip-wheel python3-pip-whl_*.deb; } \
	|| { rm -rf $(VENV); echo "cannot make a virtual environment;" \
	  "install what it needs: sudo apt-get install python3-venv" >&2; exit 1; }

$(READY): setup.cfg pyproject.toml | $(BIN)/pip
	$(STEP) "packages for $(VENV): $(TF_PACKAGE) $(TF) and the tools (the first time takes minutes)"
	@$(BIN)/python -m pip install -e '.[$(EXTRAS)]' '$(TF_PACKAGE)==$(TF).*'
	@touch $@
