# Each target sets up what it needs by itself, in .venv of this checkout. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NODES ?= 32
SYSTEM ?=
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 7 ? n + 2 : 8)))  # tests mostly wait
# Python compiles what it imports: a third of what is installed.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile -c locks/dev.txt
# Where an environment says to keep no bytecode, each of the many processes of a demo or a test compiled all of its own.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-unit lint audit format bench bench-detection bench-probes chaos dist packages images docs proto test-rollout test-console lock clean
help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "drover needs Python >= 3.11; set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "could not make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"; exit 2; }

$(VENV)/run.stamp: pyproject.toml locks/dev.txt | $(BIN)/python
	@echo "setting up $(VENV) (about a minute, 400 MB to download the first time) ..."
	@$(PIP) -e '.[collector,dashboard,simulation]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml locks/dev.txt | $(BIN)/python
	@echo "setting up $(VENV) with the development tools (about a minute the first time) ..."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/run.stamp

demo: $(VENV)/run.stamp ## a simulated fleet with faults, the collector and the console; NODES=32
	@$(BIN)/drover demo --nodes $(NODES)

test: $(VENV)/dev.stamp ## all tests (ARGS=... for pytest); SYSTEM=1 (root, Debian) installs and runs the real parts too
ifneq ($(SYSTEM),)
	@tests/system_setup.sh
endif
	@DROVER_SYSTEM=$(SYSTEM) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-unit: $(VENV)/dev.stamp ## the tests that start no process and are not long: for the loop while you work
	@$(BIN)/python -m pytest -m "unit and not long" -n $(WORKERS) --dist worksteal --ignore tests/e2e $(ARGS)

test-rollout: $(VENV)/dev.stamp ## playbooks and packages on machines with systemd, pods as containers (root, Debian; over half an hour)
	@$(PIP) -e '.[rollout]'
	@$(BIN)/ansible-lint --offline -q -c ansible/.ansible-lint ansible
	@tests/rollout/setup.sh
	@$(BIN)/python -m pytest tests/rollout $(ARGS)

test-console: $(VENV)/dev.stamp ## the console on 256 simulated nodes in real Chromium (root, Debian; five minutes)
	@command -v chromium >/dev/null || { echo "Chromium is not here: apt-get install chromium"; exit 2; }
	@DROVER_SYSTEM=1 $(BIN)/python -m pytest tests/console $(ARGS)

lint: $(VENV)/dev.stamp ## ruff, mypy --strict, words, hadolint; pip-audit where the registry knows vulnerabilities
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/check_words.py
	@$(BIN)/hadolint containers/Containerfile
	@! $(BIN)/python ansible/audit.py --ask || $(MAKE) --no-print-directory audit

audit: $(VENV)/dev.stamp ## known vulnerabilities of locked dependencies, where a registry knows them
	@$(PIP) -e '.[audit]'
	@$(BIN)/python ansible/audit.py $(ARGS)

format: $(VENV)/dev.stamp ## let ruff arrange the code
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: $(VENV)/dev.stamp ## every script of benchmarks/, one JSON line each
	@for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

bench-detection: $(VENV)/dev.stamp ## what the detectors find in the adversary's fleets, next to four baselines; one JSON line
	@$(BIN)/python benchmarks/bench_detection.py

bench-probes: $(VENV)/dev.stamp ## every probe's whole path on the CPU, one JSON line
	@$(BIN)/python benchmarks/bench_probes.py

chaos: $(VENV)/dev.stamp ## 49 faults and attacks under a running fleet, and writes docs/evidence/chaos.md (root, for all of them; sixteen minutes); ONLY="attack 'disk full'": these alone
	@$(BIN)/python benchmarks/chaos.py $(if $(ONLY),--only $(ONLY)) --write docs/evidence/chaos.md

dist: $(VENV)/dev.stamp ## wheel and offline bundles for nodes and the collector's machine, in dist/
	@$(BIN)/python ansible/dist.py $(ARGS)

packages: $(VENV)/dev.stamp ## .deb and .rpm of agent, collector and console, in dist/ (Debian: apt-get install rpm)
	@$(BIN)/python packages/build.py $(ARGS)

images: $(VENV)/dev.stamp ## their images out of the .debs, with bills of materials, in dist/images (mmdebstrap, buildah)
	@$(BIN)/python packages/images.py $(ARGS)

docs: $(VENV)/dev.stamp ## the site of docs/, in site/; fails on a broken link or anchor
	@$(PIP) -e '.[docs]'
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: ## write locks/dev.txt and ansible/locks again, from the ranges of pyproject.toml; look at the diff
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/pip install -q -q --disable-pip-version-check torch==2.13.0 -e '.[audit,dev,rollout]'
	@{ head -1 locks/dev.txt; build/lock/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' | sort -f; } >build/dev.txt
	@mv build/dev.txt locks/dev.txt
	@build/lock/bin/python ansible/dist.py --lock

proto: $(VENV)/dev.stamp ## generate the protobuf code again
	@$(BIN)/python proto/generate.py

clean: ## remove what the targets above made
	rm -rf $(VENV) build dist site demo-data test-artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis
