# Every target sets up what it needs in .venv (or .venv-bench, .venv-integrations, .venv-labels) and is quick when nothing has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
INTEGRATIONS := .venv-integrations
LABELS := .venv-labels
SETUP := pyproject.toml constraints.txt
PIP := -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt
NO_CPU_TORCH := the install failed. If pip found no CPU build of torch 2.13.0, add an index that has one (see CONTRIBUTING.md).

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full test-versions test-integrations package try-wheel coverage fuzz bench docs site census coverage-doc audit-deps clean labels tried perturb-doc

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## Set up .venv with the library, the command and the tools

$(VENV)/.installed: $(SETUP)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -e '.[dev]' || { echo "make: $(NO_CPU_TORCH)" >&2; exit 1; }
	touch $@

demo: install  ## Train a small network, measure and audit it, write its page
	$(BIN)/spiritlevel demo --out build/demo

test: install  ## Lint, types, import directions, doctests, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

$(VENV)/.installed-cluster: $(VENV)/.installed
	$(BIN)/python $(PIP) -e '.[dev,cluster]'
	touch $@

test-full: $(VENV)/.installed-cluster  ## The same, with slow tests, a Ray cluster, tests that download, and more random examples
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	HYPOTHESIS_PROFILE=full $(BIN)/pytest -m "not peers and not integrations"

test-integrations: $(INTEGRATIONS)/.installed  ## Models and data of transformers, peft, lightning, accelerate, timm, datasets, torch_geometric, in an environment of their own
	HF_HUB_OFFLINE=1 $(INTEGRATIONS)/bin/python -m pytest -q -m integrations tests

# timm would bring torchvision, of which its networks need one class: the tests have a stand-in for it.
$(INTEGRATIONS)/.installed: $(SETUP)
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python $(PIP) -e '.[dev,integrations]' || { echo "make: $(NO_CPU_TORCH)" >&2; exit 1; }
	$(INTEGRATIONS)/bin/python $(PIP) --no-deps timm
	touch $@

VERSIONS := build/versions
VERSIONS_PIP := -m pip --disable-pip-version-check --no-input install --quiet
# A part of the tests that touches every package we depend on, and all examples.
VERSIONS_TESTS := $(foreach name,architecture charts cli core data estimators loading margins measuring report results \
	stats storage studies_rules tracking training,tests/test_$(name).py) src

test-versions:  ## The oldest versions that pyproject.toml promises, and the core without extras; TORCH=2.14.0 tries another torch
	rm -rf $(VERSIONS) && mkdir -p $(VERSIONS)
	$(if $(TORCH),TORCH=$(TORCH)) $(PYTHON) tools/oldest.py > $(VERSIONS)/oldest.txt
	$(PYTHON) -m venv $(VERSIONS)/oldest
	$(VERSIONS)/oldest/bin/python $(VERSIONS_PIP) -c $(VERSIONS)/oldest.txt -e '.[all,test]' || { echo "make: $(NO_CPU_TORCH)" >&2; exit 1; }
	$(VERSIONS)/oldest/bin/python -m pytest -q -n 2 --dist worksteal $(VERSIONS_TESTS)
	$(PYTHON) -m venv $(VERSIONS)/core
	$(VERSIONS)/core/bin/python $(PIP) .
	$(VERSIONS)/core/bin/python tools/try_core.py

package: install  ## Build the wheel and the source distribution, into dist/
	rm -rf dist
	$(BIN)/pyproject-build --no-isolation --outdir dist . > /dev/null

WHEEL := build/wheel

try-wheel: package  ## Install the wheel by itself into a clean environment, and measure with it
	rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python $(PIP) dist/*.whl || { echo "make: $(NO_CPU_TORCH)" >&2; exit 1; }
	$(WHEEL)/bin/python tools/try_core.py

coverage: install  ## Which lines the tests of `make test` run, without the processes that they start; a figure here, every line in build/coverage
	COVERAGE_FILE=build/.coverage $(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

SECONDS ?= 600

fuzz: install  ## Measure random networks for SECONDS=600, and compare with differences of their loss
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tools/fuzz.py --seconds $(SECONDS) $(FUZZ)

bench: $(BENCH)/.installed  ## Compare with other libraries, in an environment of its own
	NO_SKIPS=1 $(BENCH)/bin/python -m pytest -q -m peers tests
	$(BENCH)/bin/python benchmarks/run.py --page docs/benchmarks.md --json benchmarks/last_run.json

# backpack, curvlinops and laplace-torch would bring torchvision, which they do not need: pyproject.toml lists what they do need.
# asdfghjkl is what laplace-torch imports as `asdl`; the package of that name is another one.
$(BENCH)/.installed: $(SETUP)
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) -e '.[dev,bench]' || { echo "make: $(NO_CPU_TORCH)" >&2; exit 1; }
	$(BENCH)/bin/python $(PIP) --no-deps backpack-for-pytorch curvlinops-for-pytorch laplace-torch asdfghjkl==0.1a4
	touch $@

labels: $(LABELS)/.installed  ## Which scores find flipped labels: two hours in pieces that resume; writes docs/labels.md
	OMP_NUM_THREADS=1 $(LABELS)/bin/python -W ignore benchmarks/labels.py --out benchmarks/labels_pieces --page docs/labels.md

# kronfluence would bring torchvision, which it does not need: pyproject.toml lists what it does need.
$(LABELS)/.installed: $(SETUP)
	test -x $(LABELS)/bin/python || $(PYTHON) -m venv $(LABELS)
	$(LABELS)/bin/python $(PIP) -e '.[cli,labels]' || { echo "make: $(NO_CPU_TORCH)" >&2; exit 1; }
	$(LABELS)/bin/python $(PIP) --no-deps kronfluence
	touch $@

docs: install  ## Write the generated pages of docs/, then the site to build/site, offline: open build/site/index.html
	$(BIN)/python tools/make_claims_doc.py
	$(BIN)/python tools/make_results_doc.py
	$(BIN)/python tools/make_findings_doc.py
	$(BIN)/python tools/make_perturb_doc.py --bits
	$(BIN)/python tools/make_symmetries_doc.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/make_measure_pictures.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/make_outputs.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/make_notebooks.py
	$(MAKE) site

site: install  ## The site alone, from the pages as they are
	$(BIN)/python tools/make_site.py build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

census: install  ## Try every differentiable operation in a child process, write docs/operations.md
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python tools/census.py --page docs/operations.md --json build/census.json

tried: install  ## Try 5,000 wrong arguments, command lines and files each, and write the table of SECURITY.md
	OMP_NUM_THREADS=1 $(BIN)/python tools/make_tried_doc.py

perturb-doc: install  ## Count how often the intervals of perturb hold what a change does, and write the tables of docs/perturb.md
	$(BIN)/python tools/make_perturb_doc.py

coverage-doc: install  ## Count how often 95 % intervals hold the truth, and write docs/coverage.md
	$(BIN)/python tools/make_coverage_doc.py

AUDIT := build/audit

audit-deps: install  ## Compare the installed versions with the public list of known weaknesses (needs a network)
	mkdir -p build
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > build/installed.txt
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip --disable-pip-version-check --no-input install --quiet pip-audit; } \
		|| { rm -rf $(AUDIT); echo "make: pip-audit could not be installed; this target needs a package index." >&2; exit 1; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r build/installed.txt \
		|| { echo "make: a known weakness is listed above, or the public list could not be reached for a package." >&2; exit 1; }

clean:  ## Remove what the other targets made, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
