# Two commands do all the set-up: `make demo` runs the packaged model, `make test` runs the tests.
# Both make their own environment in $(VENV), with the versions that constraints.txt pins.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal --durations=25 --durations-min=2

.PHONY: demo test test-fast test-export torture check docs dist test-dist clean

demo: $(VENV)/.demo
	$(BIN)/jaxllm demo

# One process per core; tests that compare times come last, with the machine to themselves.
test: $(VENV)/.dev
	$(PYTEST) -m "not alone"
	$(BIN)/python -m pytest -m alone $$(grep -rl mark.alone tests)

# Leaves out what takes more than some seconds.
test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow"

# The formats of other runtimes, in an environment of their own: their converter needs older packages.
test-export: $(VENV)-export/.ready
	$(VENV)-export/bin/python -m pytest -p no:anyio --numprocesses auto --maxprocesses 4 --dist loadfile \
	  tests/export/test_tflite.py tests/export/test_architectures.py tests/export/test_litertlm.py \
	  tests/export/test_edge_quantizer.py tests/export/test_iree.py tests/export/test_device.py \
	  tests/export/test_blocks.py tests/export/test_shadow.py tests/export/test_native.py \
	  tests/export/test_encoder_decoders.py tests/export/test_tiny_lm.py tests/export/test_adapter_inputs.py \
	  tests/export/test_npu.py tests/export/test_stages.py tests/export/test_codecs.py tests/export/test_families.py

# Harms files, processes, storage and calls at random for MINUTES, and tells what did not bear it.
MINUTES ?= 20
torture: $(VENV)/.dev
	$(BIN)/python -m tests.torture --minutes $(MINUTES)

# What a reviewer's machine would say: format, lint, types.
check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror jaxllm/kernels/native/* tests/kernels/native_check* examples/native/*

# The documentation's site, into site/; fails at any link that leads nowhere. Takes no network.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# The source distribution, and the wheel that is built from it, into dist/. Fails without a C++ compiler: a wheel
# lacks its native kernels only where pip builds it.
dist: $(VENV)/.dev
	rm -rf dist
	JAXLLM_NATIVE=1 $(BIN)/python -m build

# Installs both into fresh environments away from the sources, and runs the demo there.
test-dist: dist
	JAXLLM_DIST=dist $(BIN)/python -m pytest tests/test_dist.py

clean:
	rm -rf $(VENV) $(VENV)-export build dist site *.egg-info

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# All packages by name, and not this one: tests run it where it is.
$(VENV)-export/.ready: constraints-export.txt
	$(PYTHON) -m venv $(VENV)-export
	$(VENV)-export/bin/python -m pip install --quiet --no-compile --no-deps --requirement constraints-export.txt
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: jaxllm needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
