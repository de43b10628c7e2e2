# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv, but for Python's __pycache__.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
KERNELS := .venv/.kernels
# The tests start hundreds of processes, and each would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-cuda lint fast mutate bench peers images-test proto lock clean

setup: $(STAMP) $(KERNELS)

# torch first and with its dependencies: on a machine with a CPU build configured, pip takes that one; elsewhere it
# brings the CUDA libraries it needs. Everything else is installed exactly as locked, without asking anybody again.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Tandem needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' requirements.lock)" setuptools
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

# The compiled operators; without a C++ compiler plain PyTorch serves, and says so.
$(KERNELS): $(STAMP) engine/kernels/build.py $(wildcard engine/kernels/*.h engine/kernels/*.cpp)
	@$(BIN)/python -m engine.kernels.build || true
	@touch $(KERNELS)

demo: setup
	@$(BIN)/tandem demo

# Two files at a time, and a third where they leave the processor idle (tests/conftest.py): with three alike, processes of
# Ray waited for a core for longer than gRPC waits for an answer, on a Zen 4 with two cores. In their order: those that go
# one after another begin early.
test: setup lint
	@$(BIN)/python -m pytest -n 3 --no-loadscope-reorder

# The tests that need no second process and not seconds of their own (`long`), with fewer examples of each property. Four
# runs at once, of which each imports only what its tests need; xdist's workers would all import all of it. Two of them
# mostly wait.
FAST_WAITS := tests/router/test_http_server.py
FAST_ENGINE := $(addprefix tests/engine/test_,block_pool.py scheduler.py sampler.py)
fast: setup
	@printf '%s\n' $(FAST_WAITS) tests/tandem "tests/router --ignore=$(FAST_WAITS)" "tests/rules $(FAST_ENGINE)" | xargs -P 4 -I@ sh -c '$(BIN)/python -m pytest --hypothesis-profile=fast -m "not long" @'

# Steps on a pretended GPU, which need torch as PyPI has it (gigabytes) and no driver; any torch for CPU is passed over.
TORCH := $(shell sed -n 's/^torch==//p' requirements.lock)
test-cuda: setup
	@test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	@.venv-cuda/bin/python -m pip install -q --disable-pip-version-check "torch==$(TORCH),!=$(TORCH)+cpu"
	@.venv-cuda/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements.lock "torch!=$(TORCH)+cpu"
	@.venv-cuda/bin/python -m pytest $(addprefix tests/engine/test_cuda_,forward.py recurrences.py experts.py sampling.py)

# Changes the product line by line and looks whether a test fails. ARGS as `--module scheduler --sample 20`; minutes to hours.
mutate: setup
	@$(BIN)/python -m tests.mutation $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@cd proto && ../$(BIN)/buf lint
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python -m loadtest bench

# Tandem beside other engines: docs/measuring.md says how to install them. ARGS is serve, interference, engines, ...
peers: ARGS ?= --help
peers: setup
	@$(BIN)/python -m loadtest peers $(ARGS)

# Builds the images and runs the chart's pods from them on this machine; as root, with podman. ARGS as `--base IMAGE`.
images-test: setup
	@$(BIN)/python -m tests.deploy.images $(ARGS)

proto: setup
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --pyi_out=. proto/tandem/v1/*.proto

# Freezes what is installed now: install or upgrade with pip first, run the tests, then lock.
lock:
	@{ echo '# Every package of the virtual environment, exactly. Made by `make lock`; `make setup` installs it.'; \
	   echo '# torch has no local version here, so that pip takes a CPU build where one is configured.'; \
	   echo "async-timeout==5.0.1; python_full_version < '3.11.3'  # of redis; Debian 12 has Python 3.11.2"; \
	   $(BIN)/python -m pip freeze --exclude-editable --exclude setuptools --exclude pip --exclude async-timeout | sed 's/+cpu$$//'; } > requirements.lock
	@$(BIN)/python -m deploy.docker.locks cuda13

clean:
	rm -rf .venv build *.egg-info engine/kernels/_build
