PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint bench docs dashboard clean

demo: $(READY)            ## the main job: evaluate the embedded model in every format
	$(BIN)/mxref eval

test: $(READY)            ## all tests, docstring examples included
	$(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/pip install -q -c constraints.txt ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(READY)           ## CPU benchmarks, beside floors and other libraries
	$(BIN)/pip install -q -c constraints.txt -e '.[test,peers]'
	$(BIN)/mxref bench

docs: $(READY)            ## the book of the formats: docs/_build/html/index.html
	$(BIN)/pip install -q -c constraints.txt -e '.[test,docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python -m benchmarks.dashboard --out docs/_build/html/dashboard --book ../measured/index.html
	$(BIN)/python -m docs._generate.links docs/_build/html

dashboard: $(READY)       ## every record on one page: docs/_build/dashboard/index.html
	$(BIN)/python -m benchmarks.dashboard --out docs/_build/dashboard

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) docs/_build docs/formats docs/elements
