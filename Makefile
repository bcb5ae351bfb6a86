# `make demo` and `make test` are all a reader needs; both set up .venv on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint types clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt $(wildcard quantize/kernels/*.h quantize/kernels/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "phasefold needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py demo-output

test: setup
	$(BIN)/python -m pytest -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not see an editable install of this layout: it is shown the checkout under the package's name
types: setup
	@mkdir -p $(VENV)/types && ln -sfn "$(CURDIR)" $(VENV)/types/phasefold
	MYPYPATH=$(VENV)/types $(BIN)/mypy

clean:
	rm -rf $(VENV) build demo-output *.egg-info _codec*.so
