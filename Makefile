# The two commands are `make demo` and `make test`; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A folder of wheels to try first: a CPU build of torch there saves 3 GB from PyPI.
# The one that `make install` was given is remembered for the images.
WHEELS ?= $(or $(wildcard ../shared/wheels),$(shell cat $(VENV)/wheels 2>/dev/null))
export TPINFERENCE_WHEELS := $(WHEELS)
RUN := $(BIN)/python tests/run.py
EMBEDDED := PYTHONPATH=tests/kubernetes $(BIN)/python -m embedded
PORT ?= 8000
ADMIN_PORT ?= 8001

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z][a-z0-9-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: install
install: $(VENV)/installed ## make .venv with everything that tests and tools need

$(VENV)/installed: pyproject.toml tests/install.sh
	PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" bash tests/install.sh $(VENV)
	@touch $@

.PHONY: demo
demo: install ## a Kubernetes of its own, the operator, a real model, one answered question
	$(EMBEDDED) demo

.PHONY: demo-down
demo-down: install ## remove all that `make demo` made
	$(EMBEDDED) demo-down

.PHONY: serve
serve: install ## the engine alone on this machine: local Ray, two CPU ranks, OpenAI API on PORT, probes on ADMIN_PORT
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tpinference_engine serve \
	  "$$($(BIN)/python tests/models/smollm2.py)" --served-model-name smollm2 --device cpu \
	  --dtype float32 --tensor-parallel-size 2 --max-num-seqs 16 --max-model-len 2048 \
	  --host 127.0.0.1 --port $(PORT) --admin-port $(ADMIN_PORT)

.PHONY: test
test: install ## everything: check, unit, ray, integration, e2e
	$(RUN) all

.PHONY: check test-unit test-ray test-integration test-e2e
check: install ## format, lint, types, layers, generated files
	$(RUN) check
test-unit: install ## tests that need nothing but this machine, in seconds
	$(RUN) unit
test-ray: install ## the engine on a local Ray with the real model
	$(RUN) ray
test-integration: install ## the operator on a real control plane with KubeRay
	$(RUN) integration
test-e2e: install ## the whole on a real node (root)
	$(RUN) e2e

.PHONY: format
format: install ## rewrite the sources in the one format
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

.PHONY: generate
generate: install ## CRD and reference from the operator's models
	$(BIN)/python -m tpinference_operator.api.generate
