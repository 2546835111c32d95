# Each target sets up what it needs in .venv; nothing but Python 3.11+ is assumed.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
EXTRAS ?= test
# compiling all of torch and transformers ahead takes longer than what is used of them
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# what is imported is compiled once, and not again in every process that tests start
export PYTHONDONTWRITEBYTECODE =

.PHONY: wheel sdist demo test test-all test-python test-arm lint bench docs pictures clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

# a run whose worker died would wait for its tests for ever: it ends instead
PYTEST = $(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0

test: $(VENV)/.$(EXTRAS) lint
	$(PYTEST)

test-all: $(VENV)/.$(EXTRAS) lint
	$(PYTEST) -m ""

# make test-python PYTHON=python3.13 VENV=.venv-3.13: what a newer Python or numpy breaks first, on few kernels each
SHORT = tests/test_pythons.py tests/cuda/test_launch.py \
	tests/cuda/test_products.py::test_all_loads_of_two_units_are_issued_before_arithmetic_needs_the_first \
	"tests/cuda/test_products.py::test_compiled_kernels_multiply_as_float64_does_and_stay_inside_their_arrays[Q4_K]" \
	tests/cli/test_convert.py::test_the_table_says_what_became_of_each_kind_of_tensor \
	tests/cli/test_convert.py::test_exact_is_bit_exact \
	tests/cli/test_run.py::test_the_command_line_samples_as_python_does \
	tests/runtime/test_model.py::test_greedy_text_is_llama_cpps \
	tests/serve/test_endpoints.py::test_a_completion_is_the_models \
	tests/cli/test_quantize.py::test_the_command_line_quantizes_to_gguf_and_says_what_it_did \
	tests/cli/test_quantize.py::test_codes_that_fit_are_carried_beside_layers_that_are_calibrated

test-python: $(VENV)/.$(EXTRAS)
	$(PYTEST) $(SHORT)

test-arm: $(VENV)/.$(EXTRAS)
	sh scripts/arm/test.sh $(BIN)/python

lint: $(VENV)/.$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# with object code for common types: what installs it compiles none of that
wheel: $(VENV)/.release
	rm -rf bridge/objects
	$(BIN)/python scripts/build_objects.py bridge/objects
	$(BIN)/python -m build --wheel --no-isolation
	rm -rf bridge/objects

sdist: $(VENV)/.release
	$(BIN)/python -m build --sdist --no-isolation

bench: $(VENV)/.$(EXTRAS)
	$(BIN)/python -m scripts.speed.bench_convert

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

pictures: $(VENV)/.plot
	for picture in docs/pictures/*.svg; do \
		$(BIN)/gguf-bridge plot docs/measured/$$(basename $$picture .svg).json -o $$picture --force || exit 1; \
	done

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[demo]
	touch $@

$(VENV)/.docs $(VENV)/.plot $(VENV)/.release: $(VENV)/.%: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[$*]
	touch $@

$(VENV)/.$(EXTRAS): $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) -e .[$(EXTRAS)]
	touch $@

clean:
	rm -rf $(VENV) demo build site *.egg-info
