# Each target makes .venv, installs and builds what is missing, and then runs. A second call finds that done.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := CMakeLists.txt $(shell find cpp -type f -not -path 'cpp/fuzz/corpus/*')
CMAKE := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake

.PHONY: train demo test test-loaded lint types native-test thread-test model-check model-check-deep models models-deep spin \
  python-test chaos fuzz fuzz-quick fuzz-build soak endurance third-party bench setup clean
.DELETE_ON_ERROR:

train: $(VENV)/.built  ## train CartPole-v1; its run directory is under runs/
	@$(VENV)/bin/memlane train CartPole-v1

demo: $(VENV)/.built  ## the tour: real processes, a kill, and nothing left behind; a few seconds
	@$(PY) examples/tour.py

test: lint types native-test thread-test model-check models python-test chaos fuzz-quick  ## everything that CI runs

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

# The native tests three times: as released, with ThreadSanitizer, with AddressSanitizer and UBSan; and those in which a
# process dies or stops at every fault point. They run in parallel, because most of their time one thread waits for another.
native-test: build/native/.built build/native-thread/.built build/native-address/.built build/native-faults/.built
	@$(MAKE) --no-print-directory -j4 --output-sync $(^:.built=native_tests.run)

# The lanes in all executions that the C++ memory model allows, within bounds (docs/verification.md).
model-check: build/native/.built  ## small bounds, and a mutant for every PAIR; a minute
	@build/native/model_tests

model-check-deep: build/native/.built  ## larger bounds; hours
	@build/native/model_tests --deep

build/native/native_tests.run build/native-faults/native_tests.run: UNRANDOMISED :=
%/native_tests.run:
	$(UNRANDOMISED) $*/native_tests

# With wide address randomisation (vm.mmap_rnd_bits above 28) the sanitizers of GCC up to 13 find their own memory taken.
# setarch -R turns it off; where a container forbids that, they run with it.
UNRANDOMISED = $(shell setarch -R true 2>/dev/null && echo setarch -R)

SANITIZE_build/native-thread := thread
SANITIZE_build/native-address := address,undefined
FAULTS_build/native-faults := ON
build/native/.built build/native-thread/.built build/native-address/.built build/native-faults/.built: $(VENV)/.ready $(NATIVE)
	@$(CMAKE) -G Ninja -S . -B $(@D) -DMEMLANE_TESTS=ON -DMEMLANE_WERROR=ON \
	  -DMEMLANE_SANITIZE=$(SANITIZE_$(@D)) -DMEMLANE_FAULTS=$(or $(FAULTS_$(@D)),OFF) -DCMAKE_BUILD_TYPE=Release >/dev/null
	@$(CMAKE) --build $(@D)
	@touch $@

# The Python module itself with ThreadSanitizer: threads that share handles, with the GIL released.
build/extension-thread/.built: $(VENV)/.ready $(NATIVE)
	@$(CMAKE) -G Ninja -S . -B $(@D) -DMEMLANE_WERROR=ON -DMEMLANE_SANITIZE=thread -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) >/dev/null
	@$(CMAKE) --build $(@D)
	@touch $@

thread-test: $(VENV)/.built build/extension-thread/.built
	LD_PRELOAD=$$($(CXX) -print-file-name=libtsan.so) $(UNRANDOMISED) $(PY) -m tests.support.sanitized \
	  build/extension-thread/_native*.so -q -s -p no:cacheprovider -p no:xdist tests/lanes/test_threads.py

# The Promela models in models/, with small bounds; the searches take about a minute on two cores.
models: $(VENV)/.built spin
	$(PY) -m pytest -q -m models -n 2 tests/models

models-deep: $(VENV)/.built spin  ## the models with large bounds: minutes to an hour, 4 GB of memory
	$(PY) -m pytest -q -m models_deep tests/models

# Without Spin the models are skipped. Its package is not in the Python index.
spin:
	@command -v spin >/dev/null || { $(call install,spin); } \
	  || echo "The Promela models are skipped, because spin is not installed: apt-get install spin"

TESTS := not soak and not third_party and not models and not models_deep
python-test: $(VENV)/.built
	$(PY) -m pytest -q -m '$(TESTS)' -n 4 --dist worksteal

test-loaded: $(VENV)/.built  ## the Python tests beside a busy process on every core
	$(PY) -m tests.support.load $(PY) -m pytest -q -m '$(TESTS)' -n 4 --dist worksteal

# A second environment, which has the extension with fault points and finds everything else in the first one.
FAULTS := build/venv-faults
$(FAULTS)/.built: $(VENV)/.built $(NATIVE)
	@echo "building the native core with fault points ..."
	@test -x $(FAULTS)/bin/python || $(PY) -m venv --without-pip $(FAULTS)
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(FAULTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" MEMLANE_WERROR=ON MEMLANE_FAULTS=ON $(PY) -m pip --python $(FAULTS)/bin/python \
	  install --quiet --disable-pip-version-check --no-build-isolation --no-deps -C build-dir=build/extension-faults -e .
	@touch $@

CHAOS_SECONDS := 60
chaos: $(FAULTS)/.built  ## processes that die and stop at fault points, with every result checked; CHAOS_SECONDS=3600 for an hour
	$(FAULTS)/bin/python -m pytest -q tests/chaos
	$(FAULTS)/bin/python -m tests.chaos --seconds $(CHAOS_SECONDS)

RUNS ?= 1000000
fuzz: $(VENV)/.built fuzz-build  ## RUNS inputs for each fuzz target (1000000); hours
	$(UNRANDOMISED) $(PY) -m tests.fuzz --runs $(RUNS)

fuzz-quick: $(VENV)/.built fuzz-build  ## 10 seconds each, with one seed: what it finds is due to a change
	$(UNRANDOMISED) $(PY) -m tests.fuzz --seconds 10 --seed 1

# libFuzzer is part of clang, and its runtime of another package of Debian. Without them the targets in Python run alone.
HAS_LIBFUZZER = echo 'extern "C" int LLVMFuzzerTestOneInput(const char *, unsigned long) { return 0; }' \
	  | clang++ -x c++ -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null
fuzz-build:
	@$(HAS_LIBFUZZER) || { $(call install,clang libclang-rt-dev); } || true
	@if $(HAS_LIBFUZZER); then $(MAKE) --no-print-directory build/fuzz/.built; \
	else echo "the native fuzz targets are skipped: they need clang with libFuzzer; apt-get install clang libclang-rt-dev"; fi

build/fuzz/.built: $(VENV)/.ready $(NATIVE)
	@$(CMAKE) -G Ninja -S . -B $(@D) -DMEMLANE_FUZZ=ON -DMEMLANE_WERROR=ON -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ >/dev/null
	@$(CMAKE) --build $(@D)
	@touch $@

# $(call install,PACKAGES): install packages of Debian, where that is possible without a password.
install = [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing $(1) ..." && apt-get update -qq \
	  && apt-get install -qq -y --no-install-recommends $(1) >/dev/null

soak: $(VENV)/.built  ## thousands of kills and long races; minutes
	$(PY) -m pytest -m soak

ENDURANCE_SECONDS := 7200
endurance: $(VENV)/.built  ## everything for two hours: memory, descriptors and threads must not grow
	$(PY) -m tests.endurance --seconds $(ENDURANCE_SECONDS)

$(VENV)/.third-party: $(VENV)/.built
	@MEMLANE_WERROR=ON $(PIP) --no-build-isolation -e '.[dev,torch,cli,third-party]'
	@touch $@

third-party: $(VENV)/.third-party  ## environments of other projects, compared with SyncVectorEnv; minutes
	$(PY) -m pytest -m third_party

bench: $(VENV)/.peers build/native/.built  ## every benchmark: memlane and its peers in turns
	@for name in signal rows ring weights replay vector_envs real_loop native_envs train train_off_policy; do $(PY) -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
