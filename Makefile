# `make` alone lists the targets: those with a description behind `##`.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Compiled once, and not beside the sources: most of the work of a short command is to import what it needs.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache
unexport PYTHONDONTWRITEBYTECODE
# Parts that you have deleted are left out.
SOURCES := $(wildcard service sinks migrations demo tests)
PYTEST := "$(CURDIR)/$(BIN)/python" -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test check soak dev format install archives lock update clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# JVMs that have just started do most of the work of the demo and the tests: only the first-tier compiler is worth its
# time. That option shrinks the JVM's room for compiled code to a fifth; once it is full, the JVM stops compiling. So it
# is set too.
YOUNG_JVM := -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m

demo: export JDK_JAVA_OPTIONS ?= $(YOUNG_JVM)
demo: .venv/demo ## start the chain, break it three times, compare every total; ONCE=1 exits after the verdict
	@$(BIN)/outbox demo $(if $(ONCE),--once) $(if $(SEED),--seed $(SEED))

# In several processes, each with a stack of its own; ARGS="-n 0 …" for one.
test: export JDK_JAVA_OPTIONS ?= $(YOUNG_JVM)
test: archives ## all tests, on real Postgres, Kafka, Debezium and Spark
	@$(PYTEST) tests -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: install ## lint, types, declared events and unit tests, without a server
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	@$(BIN)/mypy $(SOURCES)
	@$(BIN)/outbox events check
	@$(if $(wildcard tests/unit),$(PYTEST) -q tests/unit)

# It needs a module of the project's own: the machinery's page soak.md shows how to write it.
soak: export JDK_JAVA_OPTIONS ?= $(YOUNG_JVM)
soak: archives ## clients, and faults of every kind, for as long as you want: ARGS="--duration 6h"
	@$(BIN)/outbox soak $(ARGS)

dev: install ## stack, service and sinks in one terminal; what is edited starts again
	@$(BIN)/outbox dev

format: install ## format the code, and fix what the linter can fix
	@$(BIN)/ruff check -q --fix-only . && $(BIN)/ruff format -q .

# Record the classes that the JVMs load, once: each later start of Kafka, Connect and Spark needs half the time.
archives: export JDK_JAVA_OPTIONS ?= $(YOUNG_JVM)
archives: install
	-@$(BIN)/python -m outbox_lab.stack.archives

# `make demo` installs its own part only.
SET ?= dev
install: .venv/$(SET) ## everything that tests need, into .venv

.venv/%: .venv/bin/outbox $(wildcard requirements/own.txt machinery/src/outbox/requirements/*.txt)
	@$(BIN)/python -m outbox.install $*

# The machinery alone. It knows the packages that it needs.
.venv/bin/outbox: pyproject.toml requirements/bootstrap.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "make: Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.11 …" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip --disable-pip-version-check -q install --require-hashes -r requirements/bootstrap.txt
	@VIRTUAL_ENV="$(CURDIR)/.venv" $(BIN)/uv pip install -q --reinstall --no-deps --no-build-isolation --group machinery
	@touch $@

# What the images are made of beside this folder, where the template is a folder of this machine.
.venv/machinery-context: .venv/bin/outbox
	@$(BIN)/python -m outbox.install context $@

lock: install ## pin the packages that pyproject.toml names; ARGS=--upgrade moves to newer ones
	@$(BIN)/python -m outbox.install lock $(ARGS)

update: install ## merge a newer version of the template; the answers stay as they are
	@$(BIN)/copier update --defaults $(ARGS)

clean: ## stop the stack and delete .venv; data stays
	@if [ -x $(BIN)/outbox ]; then $(BIN)/outbox down; fi
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
