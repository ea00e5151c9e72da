# `make demo` and `make test` do all their own set-up on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# Shapes and dtypes of signatures, checked in every call: 4 s of a process, and 6 % of the rest.
CHECKED := --jaxtyping-packages=stree_jax,pallas_kernels,beartype.beartype
# A file of most folders of tests runs as released in `make test-all`: as users compile. All others
# compile with less effort, see tests/conftest.py.
RELEASED := $(addprefix tests/,benchmarks/test_benchmarks.py convert/test_properties.py \
	decoding/test_padded_drafts.py extensions/test_medusa.py kernels/test_tree_ops.py models/test_golden.py \
	serving/test_prefix_cache.py sharding/test_partition.py training/test_refusals.py)
SAID := echo "pip downloads packages, then compiles the C++: 20 seconds on 2 cores, 40 with AVX-512, 5 more for VNNI"
# What an install is made of. It compiles the C++, so it is made again after a change of that.
PACKAGE := pyproject.toml setup.py pallas_kernels/native/build_backend.py \
	$(wildcard pallas_kernels/*/*.cc pallas_kernels/*/*.h)
CPP := $(wildcard pallas_kernels/*/*.cc pallas_kernels/*/*.h tests/kernels/*.cc tests/kernels/*.h)

QUICK := -m 'not thorough and not gpu and not slow and not docs'
THOROUGH := -m 'thorough and not gpu and not slow and not docs'

# build_backend.TARGETS, and what they are built with: the oldest headers, in an environment of its own.
WHEELS := manylinux_2_28_x86_64 manylinux_2_28_aarch64 macosx_11_0_arm64 macosx_11_0_x86_64
REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")

.PHONY: help install demo test test-thorough test-released test-all test-docs test-gpu test-slow docs \
	lint format types check wheels clean

help:
	@echo "make demo       decode with the embedded pair: autoregressively, with a chain, with a tree"
	@echo "make test       what a change can break: 6 minutes on 2 cores"
	@echo "make test-all   the test suite, without GPU and slow tests: 20 minutes"
	@echo "make test-docs  runs the code of the site's pages, and the examples"
	@echo "make test-gpu   only the tests that need a GPU"
	@echo "make test-slow  benchmarks run whole, at their smallest"
	@echo "make docs       the documentation site, in build/site"
	@echo "make wheels     in dist, for Linux and macOS; 7 minutes on 2 cores, docs/contributing.md"
	@echo "make check      lint, types, and make test with checks of the shapes of signatures"
	@echo "make format     rewrite the code as ruff wants it"

$(BIN)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# What the demo needs, without the tools of development.
$(BIN)/.library: $(PACKAGE) $(BIN)/.created
	@$(SAID)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(BIN)/.docs: $(PACKAGE) $(BIN)/.created
	@$(SAID)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

$(BIN)/.installed: $(PACKAGE) $(BIN)/.created
	@$(SAID)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

install: $(BIN)/.installed

demo: $(BIN)/.library
	$(BIN)/stree-jax demo

test: install
	$(BIN)/python -m pytest -n $(JOBS) $(QUICK)

test-thorough: install
	$(BIN)/python -m pytest -n $(JOBS) $(THOROUGH)

test-released: install
	STREE_JAX_TESTS="as released" $(BIN)/python -m pytest -n $(JOBS) $(RELEASED)

test-all:
	$(MAKE) --keep-going test test-thorough test-released

test-docs: install
	$(BIN)/python -m pytest -n $(JOBS) -m docs

test-gpu: install
	$(BIN)/python -m pytest -m gpu

test-slow: install
	$(BIN)/python -m pytest -n $(JOBS) -m slow

# -n: a name without a target is a warning, and -W: a warning is an error.
docs: $(BIN)/.docs
	$(BIN)/python -m sphinx -E -W -n --keep-going --quiet docs build/site
	$(BIN)/python docs/check_links.py build/site

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

types: install
	$(BIN)/mypy

check: lint types
	$(BIN)/python -m pytest -n $(JOBS) $(QUICK) $(CHECKED)

# Files that an older build left would get into them.
wheels:
	rm -rf build/lib* build/bdist* dist
	$(PYTHON) -m venv build/wheels
	$(PYTHON) -c '$(REQUIRES)' > build/wheels/requires.txt
	build/wheels/bin/python -m pip install --quiet build ziglang --requirement build/wheels/requires.txt
	for each in $(WHEELS); do \
		build/wheels/bin/python -m build --quiet --wheel --no-isolation \
			--config-setting=--build-option=--plat-name=$$each . || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info
