# Two commands: `make demo` shows a reset on a simulated GPU host, `make test` passes everything.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The newest Python from 3.11 on that is installed; ansible-core 2.19 still runs on 3.11.
BASE_PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
REQUIREMENTS := requirements.txt requirements-dev.txt
STAMP := .venv/.installed-$(shell cat $(REQUIREMENTS) | cksum | cut -d' ' -f1)
SIMULATED_HOST ?= .simulated-host
SCENARIO ?= all
# In CI a test that fails is run once more, and the summary says so: it shares two cores with real servers and hosts.
PYTEST_ARGS ?= $(if $(CI),--reruns 1)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help setup simulator demo simulator-start simulator-stop test lint unit kill-coverage integration lab molecule rehearsal rehearsal-instants aiperf benchmark-repeats bench test-gpu control-kills mutants docs score clean

help:  ## Show these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

setup: $(STAMP)  ## Create .venv with what the control node and the tests need

$(STAMP): $(REQUIREMENTS)
	@if [ -z "$(BASE_PYTHON)" ]; then \
	  echo 'Python 3.11 or newer with venv is missing. Debian, Ubuntu: sudo apt-get install python3 python3-venv' >&2; exit 1; fi
	@[ -x $(BIN)/python ] || $(BASE_PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@rm -f .venv/.installed-* && touch $@

simulator: setup  ## Build the NVML double
	@$(BIN)/python -m simulator.build $(SIMULATED_HOST)/lib >/dev/null

simulator-start: simulator  ## Start a simulated host of 8 GPUs with a hung server
	@$(BIN)/python -m simulator start --folder $(SIMULATED_HOST) --scenario hung

simulator-stop:  ## Stop the simulated host
	@[ ! -d $(SIMULATED_HOST) ] || [ ! -x $(BIN)/python ] || $(BIN)/python -m simulator stop --folder $(SIMULATED_HOST)

demo: simulator-start  ## Start the simulated host with a hung server and reset it
	@$(BIN)/ansible-playbook -i inventory/simulated playbooks/reset.yml

test: lint unit kill-coverage integration lab molecule  ## Everything: lint, unit, integration, lab hosts, molecule

lint: setup  ## ruff, mypy, yamllint, ansible-lint
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/yamllint --strict .
	$(BIN)/ansible-lint --offline --strict

unit: setup  ## Unit tests
	$(BIN)/python -m pytest tests/unit -n 2 --dist loadfile $(PYTEST_ARGS)

# What decides whom a reset ends, and the tests of it alone: other tests may not lend their coverage.
DECIDES_A_KILL := command_line ending managers policy processes scope signals survey
empty :=
comma := ,
kill-coverage: setup  ## Branch coverage of the code that decides a kill: 95 % or more
	$(BIN)/coverage run --data-file=.coverage.kill -m pytest -q $(PYTEST_ARGS) $(DECIDES_A_KILL:%=tests/unit/test_%.py)
	$(BIN)/coverage report --data-file=.coverage.kill --fail-under=95 \
	  --include=$(subst $(empty) $(empty),$(comma),$(DECIDES_A_KILL:%=module_utils/gpu_host/%.py))

integration: simulator  ## Tests on the simulated host
	$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)

# Without root or podman these say what is missing; in CI that is a failure.
lab: simulator  ## Tests on real systemd hosts (root, podman)
	@if .ci/lab-ready; then $(BIN)/python -m pytest tests/lab -n 2 --dist loadfile $(PYTEST_ARGS); else [ -z "$${CI:-}" ]; fi

molecule: simulator  ## Molecule scenarios on real systemd hosts; SCENARIO=name for one
	@if .ci/lab-ready; then molecule/run $(SCENARIO); else [ -z "$${CI:-}" ]; fi

rehearsal: simulator  ## Real SGLang on the CPU: deployed, hung, reset (3.4 GB and minutes the first time)
	$(BIN)/python -m tests.rehearsal.environment
	$(BIN)/python -m pytest tests/rehearsal -x --durations=0 $(PYTEST_ARGS)

# REHEARSAL_RECORD=1 with `make rehearsal` writes what the server answered into tests/recorded.
rehearsal-instants: simulator  ## Kill a starting SGLang at 30 instants and reset; docs/kill-at-any-instant.png
	$(BIN)/python -m tests.rehearsal.environment
	PYTHONPATH=module_utils $(BIN)/python -m tests.rehearsal.instants --instants 30 --into docs/kill-at-any-instant.json
	.rehearsal/venv/bin/python -m pip install --quiet --disable-pip-version-check matplotlib==3.11.0
	.rehearsal/venv/bin/python tests/rehearsal/plot_instants.py docs/kill-at-any-instant.json docs/kill-at-any-instant.png

aiperf: simulator  ## Measure one real server by the benchmark and by AIPerf: do they agree? (1.2 GB the first time)
	$(BIN)/python -m tests.rehearsal.environment
	PYTHONPATH=module_utils:plugin_utils $(BIN)/python -m tests.rehearsal.against_aiperf

benchmark-repeats: simulator  ## Start one real server 12 times and record its repeats; wants a quiet machine
	$(BIN)/python -m tests.rehearsal.environment
	PYTHONPATH=module_utils:plugin_utils $(BIN)/python -m tests.rehearsal.repeats tests/recorded/cpu/benchmark-repeats.json

bench: simulator  ## Measure: ratios against the one-liner
	$(BIN)/python -m pytest tests/bench -s $(PYTEST_ARGS)

test-gpu: setup  ## Tests that need a real NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu -s $(PYTEST_ARGS)

control-kills: simulator  ## Kill the control process at 100 random instants of a reset
	CONTROL_KILLS=100 $(BIN)/python -m pytest tests/lab/test_control_killed.py -s $(PYTEST_ARGS)

mutants: simulator  ## Put known faults in on purpose; each must make a test fail
	$(BIN)/python -m tests.mutants

LOGS ?= tests/recorded
score: setup  ## Classify the failed starts in LOGS=folder: precision, recall, abstentions
	@PYTHONPATH=module_utils:plugin_utils $(BIN)/python -m gpu_control.score $(LOGS)

docs: setup  ## Write the variables of roles and benchmark into their documents
	PYTHONPATH=plugin_utils $(BIN)/python -m gpu_control.role_readme roles/*/
	PYTHONPATH=plugin_utils $(BIN)/python -m gpu_benchmark.settings docs/benchmark.md

clean: simulator-stop  ## Remove what was built (not artifacts/: those are your records)
	rm -rf .venv .rehearsal .simulated-host .mypy_cache .ruff_cache .pytest_cache .hypothesis .ansible
