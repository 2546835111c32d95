# Each target sets up what it needs in .venv; nothing but Python 3.11+ is assumed.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python scripts/bench_convert.py

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[demo]
	touch $@

$(VENV)/.test: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[test]
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
