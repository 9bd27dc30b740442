# The two commands: `make demo` shows it, `make test` tests it. `make check` is the inner loop.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Compiled once, and not beside the sources: most of the work of a short command is to import what it needs.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache
unexport PYTHONDONTWRITEBYTECODE
# Parts that a project has deleted are left out.
SOURCES := $(wildcard outbox service sinks migrations demo bench tests bootstrap.py)
UNIT := $(wildcard tests/sample/unit tests/sample/*/unit)
# Nothing newer than Python 3.11. It takes the decode of a record for the one that strings had in Python 2.
VERMIN := --target=3.11- --violations --pessimistic --quiet --no-tips --exclude str.decode

.PHONY: demo test test-machinery test-sample test-cluster check format bench archives install lock update clean

demo: .venv/demo
	@$(BIN)/outbox demo $(if $(ONCE),--once) $(if $(SEED),--seed $(SEED))

# Two suites, each in a session of its own: the machinery on a domain made for its tests, and the sample. In several
# processes, each with a stack of its own; ARGS="-n 0 …" for one. Each waits for its servers for much of the time.
# Most of the work is done by JVMs that have just started: only the first-tier compiler is worth its time.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder -m "not cluster"
test-%: export JDK_JAVA_OPTIONS ?= -XX:TieredStopAtLevel=1
# All suites run, also if one fails.
SUITES := test-machinery test-sample
test: archives
	@failed=; for suite in $(SUITES); do $(MAKE) --no-print-directory $$suite || failed="$$failed $$suite"; done; \
	if [ "$$failed" ]; then echo "make: failed:$$failed" >&2; exit 1; fi

test-machinery test-sample: test-%: archives
	@$(PYTEST) tests/$* $(PARALLEL) $(ARGS)

# What few projects need: the sinks on a Spark cluster, and checkpoints in HDFS and S3.
test-cluster: archives
	@$(PYTEST) tests/machinery -m cluster $(ARGS)
	@$(if $(wildcard tests/sample/lakehouse),$(PYTEST) tests/sample/lakehouse -m cluster $(ARGS))

check:: install
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	@$(BIN)/mypy $(SOURCES)
	@$(BIN)/vermin $(VERMIN) $(SOURCES)
	@$(PYTEST) -q tests/machinery/unit
	@$(if $(UNIT),$(PYTEST) -q $(UNIT))

format: install
	@$(BIN)/ruff check -q --fix . && $(BIN)/ruff format -q .

bench: install
	@$(BIN)/python -m bench $(ARGS)

# Record the classes that the JVMs load, once: each later start of Kafka, Connect and Spark needs half the time.
archives: install
	-@$(BIN)/python -m outbox.stack.archives

# Everything that tests and benchmarks need. `make demo` installs its own part only.
install: .venv/dev

.venv/%: requirements/%.txt requirements/bootstrap.txt pyproject.toml
	@$(PYTHON) bootstrap.py $*

# Pin every Python package and every jar again; ARGS=--upgrade moves to the newest packages that pyproject.toml allows.
lock:
	@$(PYTHON) bootstrap.py lock $(ARGS)
	@$(MAKE) --silent .venv/demo
	@$(BIN)/python -m outbox.jvm.jars lock

# Merge a newer version of the template into a project that was made by `copier copy`; the answers stay as they are.
update: install
	@$(BIN)/copier update --defaults $(ARGS)

clean:
	@if [ -x $(BIN)/outbox ]; then $(BIN)/outbox down; fi
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
