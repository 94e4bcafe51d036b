# make demo   train one model fused and split over two processes; results in demo-output/
# make test   ruff, import-linter, vulture, mypy, pytest, the docs, and a wheel imported from an empty directory
# make test-gpu   the tests on a CUDA device, then F, I and W beside torch.compile there; two tables
# make test-torch VERSION=2.15   the tests with another torch, in an environment of its own
# make docs   the pages of docs/ and the API reference, as a site in build/site
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests start many processes, which otherwise compile every module that they import again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu test-torch lint types unit docs wheel clean

demo: $(VENV)/installed
	$(BIN)/autosplit compare examples.models:llama --stages 2 --schedule 1f1b \
		--microbatches 2 --steps 20 --output demo-output

# What needs one core each goes two at a time, then the tests, which take both.
test: $(VENV)/installed
	$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),-Otarget) types docs wheel lint
	$(MAKE) --no-print-directory unit

test-gpu: $(VENV)/installed
	$(BIN)/python .ci/test_on_device.py cuda

test-torch: OTHER := build/venv-$(VERSION)
test-torch:
	test -n "$(VERSION)" || { echo "name a version: make test-torch VERSION=2.15"; exit 2; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt \
		--editable '.[dev]' 'torch==$(VERSION).*'
	$(OTHER)/bin/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture

types: $(VENV)/installed
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# In an environment without the rest, docs install what they need.
docs: $(or $(wildcard $(VENV)/installed),$(VENV)/installed-docs)
	$(BIN)/sphinx-build -q -W -b html docs build/site

wheel: $(VENV)/installed
	$(BIN)/python .ci/check_wheel.py

$(VENV)/installed: EXTRA := dev
$(VENV)/installed-docs: EXTRA := docs
$(VENV)/installed $(VENV)/installed-docs: pyproject.toml setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA)]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo-output *.egg-info
