# One line a target, so that a person, pre-commit and CI run the same thing.
PYTHON ?= python3
BIN := .venv/bin
SHAPED := regard.nn,regard.models,regard.data.batch,regard.accel,regard.tasks,regard.generate,regard.explain
SHAPE_TESTS := tests/nn tests/contract tests/accel/test_packed.py tests/accel/test_cpu_decoder.py
LIMIT := --timeout 300  # seconds: a test that hangs fails instead
unexport PYTHONDONTWRITEBYTECODE  # many processes import regard: it is compiled once
MAKEFLAGS += --no-print-directory
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync)  # outputs one after the other

.PHONY: demo test check lint types shapes kernels long storm settings images figures docs tutorials format clean

demo: .venv/ready  ## set up, then learn to write numbers in French, in a minute
	$(BIN)/regard quickstart

test: .venv/ready lint  ## lint, types and the tests that every commit must pass
	$(MAKE) -j 2 $(SYNC) types kernels  # side by side: mypy uses one core
	$(BIN)/pytest -q -n 2 -m "not long" $(LIMIT) $(SHAPE_TESTS:%=--ignore=%)
	$(MAKE) shapes

check: lint types

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/ready
	$(BIN)/mypy

shapes: .venv/ready  ## the tests of layers and models, with every annotated shape checked at every call
	$(BIN)/pytest -q -n 2 -m "not long" $(LIMIT) --jaxtyping-packages=$(SHAPED),beartype.beartype $(SHAPE_TESTS)

kernels: .venv/ready  ## the Triton kernels on a CPU, by Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/pytest -q -n 2 $(LIMIT) tests/accel -k "kernel or triton" -m "not long"

long: .venv/ready  ## kill storms and other tests of minutes
	$(BIN)/pytest -q -m long

storm: .venv/ready  ## kill, fill and damage runs, and say what came of it
	$(BIN)/pytest -q -s -m long tests/storm

settings: .venv/ready  ## write docs/settings.md from the dataclasses
	$(BIN)/python -c "import regard.api as r; open('docs/settings.md', 'w', encoding='utf-8').write(r.settings_page())"

images: .venv/ready  ## draw docs/images again, from a run of the quickstart
	rm -rf runs/images
	$(BIN)/regard quickstart --out runs/images --quiet
	$(BIN)/regard explain runs/images 'seven hundred ninety-nine' --out docs/images/alignment.svg --force

figures: .venv/ready  ## draw the figures of the lectures again, and write docs/figures.md
	$(BIN)/python tools/figures.py

docs: .venv/ready  ## build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tutorials: .venv/ready  ## run the tutorials as notebooks, and write their outputs into them
	$(BIN)/python tools/tutorials.py

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs

# --no-compile: what is imported is compiled then, which is a small part of it
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
