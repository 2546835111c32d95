# Each target sets up what it needs in .venv; nothing but Python 3.11+ is assumed.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
EXTRAS ?= test
# compiling all of torch and transformers ahead takes longer than what is used of them
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# what is imported is compiled once, and not again in every process that tests start
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-all test-arm lint bench docs pictures clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

# a run whose worker died would wait for its tests for ever: it ends instead
PYTEST = $(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0

test: $(VENV)/.$(EXTRAS) lint
	$(PYTEST)

test-all: $(VENV)/.$(EXTRAS) lint
	$(PYTEST) -m ""

test-arm: $(VENV)/.$(EXTRAS)
	sh scripts/arm/test.sh $(BIN)/python

lint: $(VENV)/.$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.$(EXTRAS)
	$(BIN)/python scripts/bench_convert.py

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

pictures: $(VENV)/.plot
	for figures in docs/measured/*.json; do \
		$(BIN)/gguf-bridge plot $$figures -o docs/pictures/$$(basename $$figures .json).svg --force || exit 1; \
	done

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[demo]
	touch $@

$(VENV)/.docs $(VENV)/.plot: $(VENV)/.%: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[$*]
	touch $@

$(VENV)/.$(EXTRAS): $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[$(EXTRAS)]
	touch $@

clean:
	rm -rf $(VENV) demo build site *.egg-info
