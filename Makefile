PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint bench clean

demo: $(READY)            ## the main job: evaluate the embedded model in every format
	$(BIN)/mxref eval

test: $(READY)            ## all tests, docstring examples included
	$(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/pip install -q -c constraints.txt ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(READY)           ## CPU benchmarks, beside other libraries
	$(BIN)/pip install -q -c constraints.txt -e '.[test,peers]'
	$(BIN)/python -m pytest benchmarks --benchmark-only

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV)
