# The only thing needed: Python >= 3.10 with pip, and a C++ compiler. All else comes from PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# `make install test EXTRAS=dev,libraries` also runs the tests under other libraries.
EXTRAS ?= dev
INSTALLED := $(VENV)/.installed-$(EXTRAS)
NATIVE := $(wildcard $(addprefix src/tightfit/,_core/*.?pp _core/packing/*.?pp allocator/*.[ch]))
# An editable install knows the packages by name: a module that became one needs a new install.
PACKAGES := $(shell find src/tightfit -name __init__.py)

# An empty virtual environment whose pip works, also where Python came without ensurepip.
define new_environment
$(PYTHON) -m venv $(1) 2>/dev/null || { $(PYTHON) -m venv --without-pip $(1) \
	&& $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }
endef

.PHONY: install test sweep releases lint docs demo gpu-proof wheel clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE) $(PACKAGES)
	$(call new_environment,$(VENV))
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

# All cases of the batteries of which `make test` runs a part.
sweep: install
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --sweep -m one_in

# The batteries of features, operators and tightfit.online on the oldest PyTorch and the newest.
releases:
	PYTHON=$(PYTHON) .ci/releases

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The documentation site, in build/site; a broken link is an error.
docs: install
	[ -x $(BIN)/mkdocs ] || $(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

demo: install
	$(BIN)/tightfit demo

# Ten minutes on one GPU; says so and stops where there is none.
gpu-proof: install
	$(BIN)/python benchmarks/gpu_proof.py

# Builds a wheel, installs it into an empty environment in which no compiler can be found, uses it
# there as a newcomer would, and writes next to it what it brings along (CycloneDX).
wheel: install
	rm -rf dist build/wheel
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	$(call new_environment,build/wheel)
	cd build/wheel && PATH="$$PWD/bin" bin/python -m pip --disable-pip-version-check install \
		--quiet --only-binary :all: --constraint ../../constraints.txt ../../dist/tightfit-*.whl
	cd build/wheel && OMP_NUM_THREADS=1 PATH="$$PWD/bin" bin/tightfit demo --quick
	cd build/wheel && PATH="$$PWD/bin" bin/tightfit init mine.py
	cd build/wheel && PATH="$$PWD/bin" bin/tightfit check mine.py:make --budget-ratio 0.6
	cd build/wheel && PATH="$$PWD/bin" bin/tightfit report mine.py:make --budget-ratio 0.6 --budgets none
	cd build/wheel && PATH="$$PWD/bin" bin/python ../../examples/train_in_a_budget.py
	[ -x $(BIN)/cyclonedx-py ] || $(PIP) install --quiet --constraint constraints.txt cyclonedx-bom
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --of JSON \
		-o dist/tightfit.cdx.json build/wheel/bin/python

clean:
	rm -rf $(VENV) build dist
