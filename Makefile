# make demo      train a tiny language model with lax.psum, and with compression (CPU is enough)
# make test      lint, types and tests, as CI runs them
# make quick     lint, types and the tests of the core: three minutes, for every change
# make test-release   what daily tests leave out: all formats, comparators, benchmarks, processes
# make soak      2000 training steps under random models, methods and topologies
# make results   measures tables of docs/results.md on this machine: make results ONLY=steps,loss
# make figures   pictures and tables of README and docs/results.md, from benchmarks/evidence/results/
# make docs      the site, in site/; broken links and unlisted pages are errors
# make release-check   make test-release; builds sdist and wheel, runs the README's script with it
# make test-versions   make test's tests on JAX 0.10.2 (Python 3.11) and on the newest
# make test-gpu  the core of the GPU tests, in the Python that is active now (PYTHON=... for another)
# make test-gpu-release   the other GPU tests
# make test-gpu-pages  blocks of Python of the pages, and examples, on the GPUs of this machine

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet
NEWEST_PYTHON ?= python3.12
CORE := golden format hashing reference plan schedules psum_trees metrics weight optax

.PHONY: demo test quick test-release soak results figures docs release-check test-versions test-gpu \
	test-gpu-release test-gpu-pages clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-train
	$(VENV)/bin/python examples/train_llm.py --model tiny --compare

test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m pytest -q -n 2

quick: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m pytest -q -n 2 $(CORE:%=tests/test_%.py)

test-release: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -q -n 2 --release

soak: $(VENV)/.installed-dev
	SOAK_STEPS=2000 $(VENV)/bin/python -m pytest -q --release tests/release/test_soak.py

# Measured with the Python that is active now, which has CUDA on GPUs.
results:
	$(PYTHON) benchmarks/results.py --only $(ONLY)

figures: $(VENV)/.installed-dev
	$(VENV)/bin/python benchmarks/evidence/pages.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "site/index.html"

release-check: test-release
	.ci/release-check $(PYTHON)

test-versions:
	.ci/test-versions $(PYTHON) 'jax==0.10.2'
	.ci/test-versions $(NEWEST_PYTHON) 'jax'

test-gpu:
	$(PYTHON) -m pytest -q --durations 20 tests/gpu

test-gpu-release:
	$(PYTHON) -m pytest -q --release tests/gpu

test-gpu-pages:
	$(PYTHON) tests/gpu/gpu_pages.py

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A stamp stands for one set of extras; it is renewed when pyproject.toml changes.
$(VENV)/.installed-train: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e '.[dev,finetune]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e '.[docs]'
	@touch $@
