# The two commands: `make demo` shows it, `make test` tests it. `make check` is the inner loop.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE = 1
SOURCES := outbox service sinks migrations demo bench tests bootstrap.py
# Nothing newer than Python 3.11. It takes the decode of a record for the one that strings had in Python 2.
VERMIN := --target=3.11- --violations --pessimistic --quiet --no-tips --exclude str.decode

.PHONY: demo test check bench install lock clean

demo: .venv/demo
	@$(BIN)/python -m demo $(if $(ONCE),--once) $(if $(SEED),--seed $(SEED))

# In two processes, each with a stack of its own; ARGS="-n 0 …" for one. Most of the work is that of JVMs which have just
# begun: the first compiler is the one that pays.
test: export JDK_JAVA_OPTIONS ?= -XX:TieredStopAtLevel=1
test: install
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: install
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	@$(BIN)/mypy
	@$(BIN)/vermin $(VERMIN) $(SOURCES)
	@$(BIN)/python -m pytest -q tests/unit

bench: install
	@$(BIN)/python -m bench $(ARGS)

# Everything that tests and benchmarks need. `make demo` installs its own part only.
install: .venv/dev

.venv/%: requirements/%.txt requirements/bootstrap.txt pyproject.toml
	@$(PYTHON) bootstrap.py $*

# Pin every Python package and every jar again; ARGS=--upgrade moves to the newest packages that pyproject.toml allows.
lock:
	@$(PYTHON) bootstrap.py lock $(ARGS)
	@$(MAKE) --silent .venv/demo
	@$(BIN)/python -m outbox.jvm.jars lock

clean:
	@if [ -x $(BIN)/outbox ]; then $(BIN)/outbox down; fi
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
