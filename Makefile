# `make demo` and `make test` work from a fresh clone: each makes .venv, installs what CI installs, and runs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# VERSIONS=oldest tests with the oldest versions that pyproject.toml allows, without linters. PYTHON=python3.13 tests with
# another Python. Both have an environment of their own.
VERSIONS ?= newest
OLDEST := $(filter oldest,$(VERSIONS))
VENV := .venv$(if $(OLDEST),-oldest)$(PYTHON:%=-%)
CONSTRAINTS := constraints$(if $(OLDEST),-oldest).txt
BIN := $(VENV)/bin
comma := ,
# With an NVIDIA GPU the CUDA build of JAX is installed too; CUDA 13 needs driver 580. JAX_EXTRA=cuda12 chooses by hand, JAX_EXTRA= none.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
JAX_EXTRA ?= $(if $(DRIVER),$(shell [ "$(DRIVER)" -ge 580 ] && echo cuda13 || echo cuda12))
# For a GPU the pinned JAX is left out: its Hopper kernels are slow, and the CUDA extras exclude it (docs/versions.md).
EXTRAS := $(if $(OLDEST),test$(comma)docs$(comma)triton,dev)$(if $(JAX_EXTRA),$(comma)$(JAX_EXTRA))
INSTALLED := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))
# The demo needs the package alone. The tests' environment will do too; with torch, the demo compares with transformers.
PACKAGE_INSTALLED := $(VENV)/installed$(JAX_EXTRA:%=-%)
$(PACKAGE_INSTALLED): EXTRAS := $(JAX_EXTRA)

.PHONY: help demo fast test test-thorough lint docs docs-version dist cluster-test cuda-compiler
help:
	@echo "make demo   train, resume, export and sample a small Qwen3-MoE on this machine: 0.9 GB, and under 5 minutes on 2 cores"
	@echo "            MODEL=deepseek_v3 or qwen3 (dense) takes another model; DEMO_OPTIONS='--lora.rank 8' trains an adapter; moe-jax demo --help"
	@echo "make fast   format, lint, types and all tests but those in folders slow and tests/parallel/eight_devices: 2 minutes; T=kernels runs only tests/kernels"
	@echo "make test   format, lint, types and the test suite; FILES='tests/layers tests/test_cli.py' runs these alone"
	@echo "make test-thorough   and further sizes and combinations, some minutes more"
	@echo "            VERSIONS=oldest takes the oldest versions that pyproject.toml allows; PYTHON=python3.13 takes another Python"
	@echo "make docs   the site in site/, checked for dead links; open site/index.html"
	@echo "make docs-version   the site of this version, beside earlier versions in the branch gh-pages"
	@echo "make dist   the package in dist/, checked in a new environment without the repository; PYTHON=python3.13 takes another Python"
	@echo "make cluster-test   runs on hosts that are apart and under Slurm, 15 minutes; needs root and Debian, and changes the network"
	@echo "make cuda-compiler   250 MB for machines without a GPU: make test then compiles the Hopper kernels to machine code"

demo: $(or $(wildcard $(INSTALLED)),$(PACKAGE_INSTALLED))
	$(BIN)/moe-jax demo $(if $(MODEL),--model $(MODEL)) $(DEMO_OPTIONS)

# Bytecode is kept even where the environment forbids it: each process would compile what it imports anew.
export PYTHONDONTWRITEBYTECODE :=

# One thread per library in each of the two test processes: more would fight over two cores.
PYTEST = JAX_PLATFORMS=$${JAX_PLATFORMS-cpu} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
WORKERS := -n 2 --dist worksteal
# A process has one CPU device or eight. A deadlock between the eight is in C++, which only the thread method's exit ends.
EIGHT := tests/parallel/eight_devices
EIGHT_FILES := $(if $(FILES),$(filter $(EIGHT)%,$(FILES))$(if $(filter tests tests/parallel,$(FILES:/=)),$(EIGHT)),$(EIGHT))
OTHER_FILES := $(if $(FILES),$(filter-out $(EIGHT)%,$(FILES)),tests)

# FILES run in one process.
test: lint
	failed=; \
	$(if $(OTHER_FILES),$(PYTEST) $(if $(FILES),,$(WORKERS)) $(OTHER_FILES) || failed=yes;) \
	$(if $(EIGHT_FILES),$(PYTEST) $(if $(FILES),,$(WORKERS)) --timeout-method=thread $(EIGHT_FILES) || failed=yes;) \
	[ -z "$$failed" ]

# Ruff and mypy look only at what changed.
fast: lint
	$(PYTEST) $(WORKERS) --ignore-glob='*/slow' tests/$(T)

test-thorough:
	PYTEST_ADDOPTS='-m ""' $(MAKE) test

lint: $(INSTALLED)
ifeq ($(OLDEST),)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
endif

# mkdocs.yml says `strict`: dead links fail. With --quiet they would not.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "site/index.html"

# MIKE_OPTIONS=--push publishes the branch.
docs-version: docs
	$(PIP_INSTALL) mike
	$(BIN)/mike deploy --update-aliases $(MIKE_OPTIONS) "$$($(BIN)/python -c 'import moe_jax; print(moe_jax.__version__)')" latest
	$(BIN)/mike set-default $(MIKE_OPTIONS) latest

# Sets $$python to the name of a Python that is new enough.
define FIND_PYTHON
for python in $(or $(PYTHON),python3.12 python3) none; do \
  $$python -c 'import sys; raise SystemExit(sys.version_info < (3, 12))' 2>/dev/null && break || true; \
done; \
if [ $$python = none ]; then \
  echo "moe_jax needs Python 3.12 or later as $(or $(PYTHON),python3.12 or python3) on PATH; python3 is $$(python3 --version 2>&1)" >&2; exit 1; \
fi
endef

# Without bytecode of 19,000 files, a minute and a half of one core: the first import of each compiles it.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(INSTALLED) $(PACKAGE_INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(FIND_PYTHON); \
	echo "Installing moe_jax$(EXTRAS:%=[%]) into $(VENV) with $$($$python --version): several minutes the first time"; \
	$$python -m venv $(VENV)
	@$(PIP_INSTALL) --constraint $(if $(JAX_EXTRA),<(grep -vE '^jax(lib)?==' $(CONSTRAINTS)),$(CONSTRAINTS)) --editable '.$(EXTRAS:%=[%])'
	@touch $@

# The smoke test runs from an empty folder: in this one, Python would import the repository's moe_jax.
DIST_TOOLS := .venv-dist-tools
DIST_VENV := $(CURDIR)/.venv-dist
dist:
	@$(FIND_PYTHON); rm -rf dist $(DIST_VENV); \
	$$python -m venv $(DIST_TOOLS); $$python -m venv $(DIST_VENV)
	$(DIST_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(DIST_TOOLS)/bin/python -m build --outdir dist
	$(DIST_TOOLS)/bin/python -m twine check --strict dist/*
	$(DIST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile dist/*.whl
	cd $$(mktemp -d) && JAX_PLATFORMS=cpu $(DIST_VENV)/bin/python -P $(CURDIR)/tests/dist_smoke.py

# Packages that check the files for Kubernetes and SkyPilot depend on other versions than ours.
CLUSTER_VENV := .venv-cluster
cluster-test: $(INSTALLED)
	apt-get install -y --no-install-recommends iproute2 faketime slurm-wlm munge
	MOE_JAX_CLUSTER_TEST=1 $(PYTEST) -v -s --timeout 1800 tests/cluster
	@$(FIND_PYTHON); $$python -m venv $(CLUSTER_VENV)
	$(CLUSTER_VENV)/bin/python -m pip install --quiet pytest pyyaml kubernetes-validate kubeflow-trainer-api skypilot
	$(CLUSTER_VENV)/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest tests/cluster/test_files_of_clusters.py

# Beside the environment, where JAX would look for a GPU; tests that compile for an H200 (tests/helpers/h200.py) use it.
cuda-compiler: $(INSTALLED)
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/cuda-compiler \
	  jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37
