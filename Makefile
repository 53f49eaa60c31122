SHELL := bash
PYTHON_IN := .venv/bin/python
PYTHON_CORE := .venv-core/bin/python
# Where SGLang runs on a GPU (make gpu-check, make demo-gpu).
PYTHON ?= python3
# Extra arguments for pytest (make test) or the demo (make demo).
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-core setup-vllm check format docs test test-core test-nightly coverage bench faults soak fuzz golden demo demo-gpu demo-vllm lab gpu-check gpu-kit models proto lock licences sbom audit upstream clean

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { \
	  line = sprintf("make %-12s", $$1); count = split($$2, words, " "); \
	  for (i = 1; i <= count; i++) { \
	    if (length(line) + length(words[i]) + 1 > 80) { print line; line = sprintf("%17s", "") } \
	    line = line " " words[i] } \
	  print line }' $(MAKEFILE_LIST)

setup: ## Virtual environment .venv with CPU torch, SGLang and the project
	@scripts/setup.sh

setup-core: ## Virtual environment .venv-core with the sidecar and its tests, without torch and engines (one minute)
	@scripts/setup_core.sh

setup-vllm: ## Virtual environment .venv-vllm with CPU torch, vLLM and the shim (one minute, 3 GB)
	@scripts/setup_vllm.sh

check: setup ## The static part: format, lint, types, contract, drift of what is generated
	@echo "check: ruff format" && .venv/bin/ruff format --check .
	@echo "check: ruff" && .venv/bin/ruff check .
	@echo "check: mypy" && .venv/bin/mypy
	@echo "check: layers of the import graph" && .venv/bin/lint-imports --no-logo
	@echo "check: buf" && scripts/buf.sh .venv/bin/buf
	@echo "check: stubs" && $(PYTHON_IN) scripts/proto.py --check
	@echo "check: metrics reference" && $(PYTHON_IN) scripts/metrics_reference.py --check
	@echo "check: settings of the decision" && $(PYTHON_IN) scripts/decision_settings.py --check
	@echo "check: API reference" && $(PYTHON_IN) scripts/api_reference.py --check
	@echo "check: results in docs/learning.md" && $(PYTHON_IN) scripts/learning_results.py --check
	@echo "check: alert rules for Kubernetes" && $(PYTHON_IN) scripts/prometheus_rule.py --check
	@echo "check: shared files of the Helm chart" && $(PYTHON_IN) scripts/helm_files.py --check
	@echo "check: workflows, forms and hooks" && scripts/forge.sh .venv/bin
	@echo "check: prose" && $(PYTHON_IN) scripts/prose.py
	@echo "check: names" && $(PYTHON_IN) scripts/names.py
	@echo "check: package READMEs" && $(PYTHON_IN) scripts/readmes.py
	@echo "check: links and anchors of the documents" && .venv/bin/mkdocs build
	@echo "check: licences of the images" && $(PYTHON_IN) scripts/bill_of_materials.py licences
	@echo "check: ok"

format: setup ## Formats the code, and repairs what ruff can repair
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format .

docs: setup ## The documents as a site, in build/site; a dead link or anchor ends the build
	@.venv/bin/mkdocs build
	@echo "docs: build/site/index.html"

test: setup ## The tests of CI (ARGS="-m 'not engine and not packaging'" for the quick ones)
	@$(PYTHON_IN) -m pytest -m "not nightly" $(ARGS)

# The list leaves out what needs an engine or a Debian package, and files that play long runs of the
# core: set-up and tests take two minutes on two cores.  `make test` runs all of them.
test-core: setup-core ## The tests of the core and the sidecar, in .venv-core (one minute)
	@$(PYTHON_CORE) -m pytest -n auto --dist loadfile -m "not slow and not nightly" @tests/core_tests.txt $(ARGS)

coverage: setup-core ## Branch coverage of controller/core and engine_shim/link by their tests, in .venv-core
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(PYTHON_CORE) -m coverage run -m pytest -q -n auto -m "not nightly" \
	  tests/unit/controller/core tests/unit/engine_shim/link $(ARGS)
	@$(PYTHON_CORE) -m coverage combine --quiet
	@$(PYTHON_CORE) -m coverage report

test-nightly: setup ## The tests that take too long for CI (half an hour)
	@$(PYTHON_IN) -m pytest -m nightly $(ARGS)

bench: setup ## What it costs, against its bars (40 minutes; ARGS="--only link fold")
	@$(PYTHON_IN) -m tools.bench $(ARGS)

faults: setup ## Kills, stops, cuts off and fills up what can be, and shows what came of it (half an hour)
	@$(PYTHON_IN) -m tools.faults $(ARGS)

soak: setup ## Half an hour of load: nothing may grow, nothing may differ from what is on record
	@$(PYTHON_IN) -m tools.soak $(ARGS)

fuzz: setup ## Bad input for everything that reads, for as long as you like (ARGS="--minutes 240")
	@$(PYTHON_IN) -m tools.fuzz $(ARGS)

golden: setup ## Compares the standard suite's decisions and numbers with the golden ones (six minutes)
	@$(PYTHON_IN) -m tests.support.golden $(ARGS)

demo: setup ## What steering gains: one day, four policies, the real SGLang at an H100's pace (8 minutes)
	@$(PYTHON_IN) -m lab.demo $(ARGS)

demo-gpu: ## The day of the demo on a GPU, at its own pace, where SGLang and this project are installed (9 minutes)
	@$(PYTHON) -m lab.demo.gpu $(ARGS)

demo-vllm: setup setup-vllm ## vLLM on this processor: off, one static draft length, steered; exact tokens (3 minutes)
	@$(PYTHON_IN) -m lab.vllm_engine

lab: setup ## What the papers say of drafters that learn, claim by claim, on small real models (ARGS=tts-length for one)
	@$(PYTHON_IN) -m lab.learning $(ARGS)

gpu-check: ## Measures every arm with CUDA graphs, where SGLang and this project are installed
	@$(PYTHON) -m lab.gpu_check --keep-profile profiles $(ARGS)

gpu-kit: ## Makes .kit, with which gpu-check and demo-gpu run on a GPU machine without a network (0.7 GB)
	@scripts/gpu_kit/build.sh

models: setup ## Trains the small models anew (they are checked in)
	@$(PYTHON_IN) -m lab.cpu_engine.models.make $(ARGS)

proto: setup ## Generates the stubs from proto/
	@$(PYTHON_IN) scripts/proto.py

lock: setup ## Writes what .venv holds to requirements/constraints.txt, and what the images install to requirements/lock
	@scripts/lock.sh $(ARGS)

licences: setup ## Lists the licences of what the images install (build/licences.md); refuses any not allowed
	@$(PYTHON_IN) scripts/bill_of_materials.py licences --output build/licences.md

sbom: setup ## A CycloneDX bill of materials of the sidecar's image (build/sbom.json)
	@$(PYTHON_IN) scripts/bill_of_materials.py sbom --output build/sbom.json

audit: setup ## Asks for known vulnerabilities of what the images install (needs the advisories' service)
	@$(PYTHON_IN) scripts/audit.py

upstream: setup ## Holds the newest version of each engine against what the plugins use, for maintainers (0.4 GB)
	@$(PYTHON_IN) scripts/upstream.py

clean: ## Removes everything that was made, .venv included
	@rm -rf .venv .venv-core .venv-vllm .kit build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
