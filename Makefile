# Each target makes .venv, installs and builds what is missing, and then runs. A second call finds that done.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := CMakeLists.txt $(shell find cpp -type f)
CMAKE := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake

.PHONY: train demo test test-loaded lint types native-test python-test soak third-party bench setup clean
.DELETE_ON_ERROR:

train: $(VENV)/.built  ## train CartPole-v1; its run directory is under runs/
	@$(VENV)/bin/memlane train CartPole-v1

demo: $(VENV)/.built  ## the tour: real processes, a kill, and nothing left behind; a few seconds
	@$(PY) examples/tour.py

test: lint types native-test python-test  ## everything that CI runs

setup: $(VENV)/.built

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v g++ >/dev/null || { echo "memlane needs a C++ compiler: apt-get install g++"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "memlane needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) ..."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) scikit-build-core nanobind cmake ninja numpy
	@MEMLANE_WERROR=ON $(PIP) --no-build-isolation -e '.[dev,torch,cli]'
	@touch $@ $(VENV)/.built

$(VENV)/.built: $(VENV)/.ready $(NATIVE)
	@echo "building the native core ..."
	@MEMLANE_WERROR=ON $(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.peers: $(VENV)/.built
	@MEMLANE_WERROR=ON $(PIP) --no-build-isolation -e '.[dev,torch,cli,peers]'
	@touch $@

lint: $(VENV)/.built
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $$(git ls-files 'cpp/*.c' 'cpp/*.h' 'cpp/*.cpp' 'cpp/*.hpp')
	$(VENV)/bin/codespell

types: $(VENV)/.built
	$(VENV)/bin/mypy

# The native tests three times: as released, with ThreadSanitizer, with AddressSanitizer and UBSan. They run in parallel,
# because most of their time one thread waits for another.
native-test: build/native/.built build/native-thread/.built build/native-address/.built
	@$(MAKE) --no-print-directory -j3 --output-sync $(^:.built=native_tests.run)

build/native/native_tests.run: UNRANDOMISED :=
%/native_tests.run:
	$(UNRANDOMISED) $*/native_tests

# With wide address randomisation (vm.mmap_rnd_bits above 28) the sanitizers of GCC up to 13 find their own memory taken.
# setarch -R turns it off; where a container forbids that, they run with it.
UNRANDOMISED = $(shell setarch -R true 2>/dev/null && echo setarch -R)

SANITIZE_build/native-thread := thread
SANITIZE_build/native-address := address,undefined
build/native/.built build/native-thread/.built build/native-address/.built: $(VENV)/.ready $(NATIVE)
	@$(CMAKE) -G Ninja -S . -B $(@D) -DMEMLANE_TESTS=ON -DMEMLANE_WERROR=ON \
	  -DMEMLANE_SANITIZE=$(SANITIZE_$(@D)) -DCMAKE_BUILD_TYPE=Release >/dev/null
	@$(CMAKE) --build $(@D)
	@touch $@

TESTS := not soak and not third_party
python-test: $(VENV)/.built
	$(PY) -m pytest -q -m '$(TESTS)' -n 4 --dist worksteal

test-loaded: $(VENV)/.built  ## the Python tests beside a busy process on every core
	$(PY) -m tests.support.load $(PY) -m pytest -q -m '$(TESTS)' -n 4 --dist worksteal

soak: $(VENV)/.built  ## thousands of kills and long races; minutes
	$(PY) -m pytest -m soak

$(VENV)/.third-party: $(VENV)/.built
	@MEMLANE_WERROR=ON $(PIP) --no-build-isolation -e '.[dev,torch,cli,third-party]'
	@touch $@

third-party: $(VENV)/.third-party  ## environments of other projects, compared with SyncVectorEnv; minutes
	$(PY) -m pytest -m third_party

bench: $(VENV)/.peers build/native/.built  ## every benchmark: memlane and its peers in turns
	@for name in signal rows ring weights replay vector_envs real_loop native_envs train train_off_policy; do $(PY) -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
