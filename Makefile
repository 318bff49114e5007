# Everything a newcomer needs. Needs git, make and Python >= 3.11 with venv; `make test` on Debian installs the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo run test test-docker lint bench eval-incidents clean

demo: $(VENV)/.installed  ## the daemon on a simulated host
	$(BIN)/gpu-oom-exporter serve --demo $(ARGS)

run: $(VENV)/.installed  ## the daemon on this host
	$(BIN)/gpu-oom-exporter serve $(ARGS)

test: $(VENV)/.installed-dev  ## everything CI runs
	tests/tools/install-debian-parts.sh
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/gpu-oom-exporter generate --check
	$(BIN)/python -m pytest $(ARGS)

test-docker: $(VENV)/.installed-dev  ## container names against a real Docker engine (opt-in)
	DOCKER=1 $(BIN)/python -m pytest tests/e2e/test_docker.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## cost per tick, per hour and per scrape, beside nvitop-exporter
	$(BIN)/python -m tests.bench $(ARGS)

eval-incidents: $(VENV)/.installed-dev  ## precision and recall of log classification on the corpus
	$(BIN)/python -m tests.eval_incidents $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed
