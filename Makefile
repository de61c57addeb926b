# make install | demo | demo-moe | test | test-all | check | bench. Everything runs in .venv; data go to ~/.cache/megalite.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# More arguments for pip, for example a package index with the CPU build of torch, which is much smaller.
PIP_ARGS ?=
TEST_ARGS ?=
# Test processes side by side. Each has a world of its own, of up to 8 ranks.
JOBS ?= 2

BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help install demo demo-moe test test-all kernels-36 check format bench clean

help:
	@echo "make demo      train a small GPT on real text on the CPU (about two minutes), then sample from it"
	@echo "make demo-moe  the same with a mixture of experts, and a picture of where tokens go"
	@echo "make test      the test suite (make test-all: with the full layout tables)"
	@echo "make kernels-36  compile all kernels for all GPUs with triton 3.6 too"
	@echo "make check     ruff, basedpyright, import-linter"
	@echo "make bench     step time side by side with a plain PyTorch loop"
	@echo "make install   only the virtual environment, in .venv"

install: $(STAMP)

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'megalite needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@# Debian's python3 has no ensurepip unless python3-venv is installed; its pip can still fill the environment.
	@"$(PYTHON)" -m venv .venv || { "$(PYTHON)" -m venv --clear --without-pip .venv \
	  && "$(PYTHON)" -m pip --python $(BIN)/python install --quiet pip; }

$(STAMP): setup.py pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing megalite, its dependencies and its tools into .venv (minutes, the first time)"
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[test,dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(call run,demo,pretrain_gpt.py)

demo-moe: $(STAMP)
	$(call run,moe_demo,pretrain_moe.py)
	@echo "Where tokens go, layer by layer and step by step: runs/moe_demo/router_heatmap.png"

# Trains configs/$(1).yaml with script $(2) on two ranks in runs/$(1), an older run there moved away, and samples text.
define run
	@if [ -e runs/$(1)/.lock ] && ! flock --nonblock runs/$(1)/.lock true; then \
	  echo 'a run is under way in runs/$(1): wait for it, or stop it with Ctrl-C' >&2; exit 1; fi
	@if [ -e runs/$(1) ]; then old="runs/$(1).$$(date +%Y%m%d-%H%M%S)"; mv runs/$(1) "$$old"; \
	  echo "an older run was moved to $$old"; fi
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 $(2) --config configs/$(1).yaml
	@echo
	$(BIN)/python tools/generate.py runs/$(1) --prompt 'Return a new' --max-new-tokens 120
	@echo
	@echo "The run is in runs/$(1): config.yaml, metrics.jsonl (one object a step), log.txt, tensorboard/, checkpoints/."
endef

# One thread: ranks of the test world share the cores.
test: $(STAMP)
	$(call pytest,-m 'not full')

test-all: $(STAMP)
	$(call pytest,)

# Triton's interpreter and its compiler take a process each; a -k in TEST_ARGS may leave these nothing to do (5).
define pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(1) $(TEST_ARGS)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
	  tests/kernels/interpreter $(1) $(TEST_ARGS) || [ $$? -eq 5 ]
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/aot $(1) $(TEST_ARGS) || [ $$? -eq 5 ]
endef

# The triton that many GPU machines have, in a folder of its own that goes before the installed one.
kernels-36: $(STAMP)
	@test -d .triton-3.6 || $(BIN)/python -m pip install --quiet --no-deps --target .triton-3.6 triton==3.6.0
	PYTHONPATH=.triton-3.6 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/aot $(TEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_step.py

clean:
	rm -rf .venv build dist *.egg-info
