# Every target does its own set-up: a virtual environment, its packages, the
# native build. A second run finds them done.

TF ?= 2.21
TF_OF_VENV := 2.21
VENV ?= $(if $(filter $(TF_OF_VENV),$(TF)),.venv,.venv-$(TF))
TF_PACKAGE ?= $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
WHEEL_FOR ?= 2.20 2.21
JOBS ?= 2
PARTS ?= 3
FUZZ_SECONDS ?= 3
PYTEST_ARGS ?=
N ?= 30
SEED ?= 1
EXTRAS ?= plot,docs,dev,litert
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null \
  && echo $$p && break; done)
ifeq ($(origin CXX),default)
CXX := $(firstword $(notdir $(shell command -v g++ clang++)) g++)
endif

# The parts of the Python tests, each a run of pytest: some folders, others together, and all else, longest first, for
# else one of them runs alone at the end. Few parts, for each loads TensorFlow anew, and twice more for the processes
# that its tests start. Together are those whose tests leave TensorFlow to processes of their own, and often wait.
TOGETHER := gallery faults docs launcher launch doctor integration engines bench pains colab packaging
TRAINING := quantize optimizers compression callbacks extreme adversarial
FOLDERS := strategy recompute sync
PYTHON_PARTS := python-strategy python-training python-rest python-processes python-recompute python-sync
WHERE = tests/$*
WHERE_processes := $(TOGETHER:%=tests/%)
WHERE_training := $(TRAINING:%=tests/%)
WHERE_rest := $(filter-out $(FOLDERS:%=tests/%) $(WHERE_processes) $(WHERE_training) tests/native tests/addons tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)

# What make test leaves out, since it takes long.
MORE_PARTS := more-strategy more-rest
MORE := $(shell grep -lE 'mark\.(slow|one_in)\b' tests/test_*.py tests/*/test_*.py)
WHERE_more-strategy := $(filter tests/strategy/%,$(MORE))
WHERE_more-rest := $(filter-out $(WHERE_more-strategy),$(MORE))

# Where .ci/timed notes what each part took; a make that this one calls notes it in the same file.
ifndef TIMES
export TIMES := $(shell mktemp -u)
endif

# What the version of TensorFlow or Keras may break: kernels, graphs that are read or changed, names that are private.
OPS := $(filter-out %/test_build.py %/test_units.py,$(wildcard tests/ops/test_*.py))
OF_TENSORFLOW := $(OPS) tests/integration/test_transports.py \
  $(filter-out %/test_private_names.py,$(wildcard tests/bridge/test_*.py)) \
  $(patsubst %,tests/strategy/test_%.py,feed own_losses start) \
  $(patsubst %,tests/exchange/test_%.py,team lookups) \
  $(patsubst %,tests/recompute/test_%.py,private traced_step) tests/optimizers/test_fused.py

ADDONS := TF=2.15 VENV=.venv-addons PYTHON=python3.11 EXTRAS=test,addons
BIN := $(VENV)/bin
# Nothing is installed into an environment outside of this checkout: it belongs to something else.
OUTSIDE := $(filter-out $(CURDIR)/%,$(or $(realpath $(VENV)),$(abspath $(VENV))))
READY := $(if $(OUTSIDE),as-it-is,$(VENV)/.ready-tf-$(TF))
CPP := $(shell find custom_ops tests/native -name '*.h' -o -name '*.cc' -o -name '*.inc' 2>/dev/null)
STEP = @printf '\n==> %s\n'

.PHONY: help venv build wheel demo bench bench-native gallery pains docs ci ci-tf test test-all test-gpu test-torch test-ray test-native test-python $(PYTHON_PARTS) test-more $(MORE_PARTS) test-tf test-faults test-addons lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  TF=2.20 takes another TensorFlow (in a virtual environment of its own),"
	@echo "  PYTHON=python3.12 another Python, CXX=clang++ another compiler."

venv: $(READY) ## make the virtual environment, with TensorFlow $(TF)

build: $(READY) ## build the native library (it is cached per user)
	$(STEP) "native library"
	@.ci/timed "library for TensorFlow $(TF)" $(BIN)/tfscale build $(if $(OUT),--out '$(OUT)')

wheel: $(WHEEL_FOR:%=library-%) ## make a wheel that holds the libraries for TensorFlow $(WHEEL_FOR), in dist/
	$(STEP) "wheel with libraries"
	@TFSCALE_WHEEL_LIBRARIES=$$(echo $(WHEEL_FOR:%=$(CURDIR)/build/libraries/%/libtfscale.so) | tr ' ' :) \
	  $(BIN)/python -m build --wheel

library-%:
	@$(MAKE) --no-print-directory build TF=$* OUT=build/libraries/$*

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

pains: build ## run programs that people complained of, under TensorFlow's strategies and under ours
	$(STEP) "programs of public complaints"
	@$(BIN)/python -m tests.pains

docs: $(READY) ## make the site of docs/, in build/site, with links and anchors checked
	$(STEP) "site"
	@TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m sphinx -W --keep-going -q -c docs/site docs build/site
	@echo "build/site/index.html"

ci: test-native test-python ci-tf lint test-ray test-addons ## check all that CI checks (make -j2 ci: two parts at a time)
	@.ci/timed

# Parts run at the same time, for tests often wait; what a part prints comes when it has ended.
test: ## run the quick tests, and tell what each part took
	@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(PARTS)) --keep-going \
	  --output-sync=target test-native test-python; code=$$?; .ci/timed; exit $$code

test-all: FUZZ_SECONDS := 10
test-all: test-native build ## run all tests, the full grids too (hours)
	$(STEP) "the engine over each way of sockets"
	@$(MAKE) -s --no-print-directory -C tests/native CXX=$(CXX) check-networks
	$(STEP) "all Python tests, TensorFlow $(TF)"
	@$(BIN)/python -m pytest -m "" $(PYTEST_ARGS)
	$(STEP) "what talks to other processes, over TensorFlow's gRPC"
	@TFSCALE_TRANSPORT=grpc $(BIN)/python -m pytest tests/ops tests/strategy tests/callbacks $(PYTEST_ARGS)

# With jobs of its own: these are so many that they would keep other parts from beginning.
test-native: ## test and fuzz the C++ under sanitizers, without TensorFlow
	$(STEP) "native tests"
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler: sudo apt-get install g++" >&2; exit 1; }
	@.ci/timed native env -u MAKEFLAGS $(MAKE) -s --no-print-directory -C tests/native -j$(JOBS) --output-sync=target \
	  CXX=$(CXX) FUZZ_SECONDS=$(FUZZ_SECONDS) check

test-python: $(PYTHON_PARTS) ## run the Python tests (PYTEST_ARGS="-k ring" for some)

# Pytest's 5 means that no test was selected, which PYTEST_ARGS may ask for.
$(PYTHON_PARTS): python-%: build
	$(STEP) "Python tests: $*, TensorFlow $(TF)"
	@.ci/timed $* sh -c '$(BIN)/python -m pytest -m "not full and not slow" $(or $(WHERE_$*),$(WHERE)) "$$@" \
	  $(if $(PYTEST_ARGS),|| test $$? = 5)' pytest $(PYTEST_ARGS)

test-more: $(MORE_PARTS) ## run the slow tests, which make test leaves out (an hour or so)

$(MORE_PARTS): build
	$(STEP) "Python tests: $@, TensorFlow $(TF)"
	@.ci/timed $@ $(BIN)/python -m pytest -m "slow and not full" $(WHERE_$@) $(PYTEST_ARGS)

test-tf: build ## run some of what depends on TensorFlow: make test-tf TF=2.20
	$(STEP) "quick tests, TensorFlow $(TF)"
	@.ci/timed "TensorFlow $(TF)" $(BIN)/python -m pytest -m "not slow and not full" --one-in 16 \
	  $(OF_TENSORFLOW) $(PYTEST_ARGS)

ci-tf: # the other TensorFlow, built by the other compiler
	@$(MAKE) --no-print-directory test-tf TF=2.20 CXX=clang++ EXTRAS=plot,test

test-gpu: build ## test what needs a GPU (make test-gpu VENV=.venv-gpu TF_PACKAGE='tensorflow[and-cuda]')
	$(STEP) "tests on GPUs"
	@$(BIN)/python -c 'import sys, tensorflow as tf; sys.exit(not tf.config.list_physical_devices("GPU"))' \
	  || { echo "TensorFlow sees no GPU here (VENV=$(VENV) has TF_PACKAGE=$(TF_PACKAGE))" >&2; exit 1; }
	@$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

test-torch: build ## compare eigenvalues with PyHessian's and curvlinops', on PyTorch
	$(STEP) "eigenvalues against PyHessian and curvlinops"
	@$(MAKE) -s --no-print-directory VENV=.venv-torch .venv-torch/bin/pip
	@.venv-torch/bin/python -m pip install -q torch torchvision pyhessian curvlinops-for-pytorch scipy
	@TFSCALE_TORCH_PYTHON=.venv-torch/bin/python $(BIN)/python -m pytest -s tests/curvature/test_rivals.py

# Beside Ray it has what $(VENV) has: TensorFlow is not installed once more.
test-ray: build ## train under a real Ray, and kill one of its workers
	@$(MAKE) -s --no-print-directory VENV=.venv-ray .venv-ray/bin/pip
	$(STEP) "Ray"
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@.ci/timed "packages for .venv-ray" sh -ec '.venv-ray/bin/python -m pip install -q "ray[train]"; \
	  .venv-ray/bin/python -m pip install -q --no-deps tf_keras'
	@TFSCALE_RAY_PYTHON=.venv-ray/bin/python .ci/timed Ray $(BIN)/python -m pytest tests/engines/test_ray.py $(PYTEST_ARGS)

test-faults: build ## let N trainings meet faults drawn by SEED, and start them again
	$(STEP) "$(N) faults, seed $(SEED)"
	@$(BIN)/python -m tests.faults.campaign --n $(N) --seed $(SEED)

test-addons: ## test with TensorFlow 2.15, Keras 2 and tensorflow-addons (needs python3.11)
	@$(MAKE) --no-print-directory $(ADDONS) build
	$(STEP) "tests of ops, strategy and optimizers, tensorflow-addons"
	@.ci/timed addons .venv-addons/bin/python -m pytest -m "not slow and not full" --one-in 16 \
	  $(OPS) tests/addons $(PYTEST_ARGS)

lint: $(READY) ## check style and types
	$(STEP) "lint"
	@.ci/timed lint sh -ec '$(BIN)/ruff check .; $(BIN)/ruff format --check .; $(BIN)/mypy; \
	  $(BIN)/clang-format --dry-run -Werror $(CPP)'

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
	@$(BIN)/python -m pip install -q --upgrade pip # an old one takes longer to find which packages fit

ifdef OUTSIDE
.PHONY: as-it-is
as-it-is:
	@test -x $(BIN)/python || { echo "VENV=$(VENV) is outside of this checkout and has no bin/python: make that" \
	  "environment yourself, or leave VENV out, and make sets one up in .venv" >&2; exit 1; }
	$(STEP) "VENV=$(VENV) is outside of this checkout: make uses it as it is and installs nothing there"
else
$(READY): setup.cfg pyproject.toml | $(BIN)/pip
	$(STEP) "packages for $(VENV): $(TF_PACKAGE) $(TF) and the tools (the first time takes minutes)"
	@.ci/timed "packages for $(VENV)" $(BIN)/python -m pip install -e '.[$(EXTRAS)]' '$(TF_PACKAGE)==$(TF).*'
	@touch $@
endif
