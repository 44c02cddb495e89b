# Everything a contributor does. `make` alone lists it.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_CASES ?= 10000000
FUZZ_PROCESSES ?= 2
FUZZ_ARGS ?=
EXTRAS := demo,dev

VENV := .venv
VENV42 := .venv-spark42
VENV43 := .venv-spark43
BIN := $(VENV)/bin
BIN42 := $(VENV42)/bin
BIN43 := $(VENV43)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments ---------------------------------------------------------------------------------------------------------

.PHONY: install
install: $(VENV)/.installed ## Make .venv, with .venv/bin/penstock in it (Spark 4.1)

.PHONY: install-spark42
install-spark42: $(VENV42)/.installed ## Make .venv-spark42, the same with Spark 4.2

.PHONY: install-spark43
install-spark43: $(VENV43)/.installed ## Make .venv-spark43, the same with Spark 4.3 and Spark Connect

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# The same packages, except for those that constraints-spark42.txt names again.
$(VENV42)/.installed: pyproject.toml constraints.txt constraints-spark42.txt
	$(PYTHON) -m venv $(VENV42)
	awk -F '==' 'FNR == NR { newer[$$1]; print; next } !($$1 in newer)' constraints-spark42.txt constraints.txt > $(VENV42)/constraints.txt
	$(BIN42)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV42)/constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

$(VENV43)/.installed: pyproject.toml constraints.txt constraints-spark43.txt
	$(PYTHON) -m venv $(VENV43)
	awk -F '==' 'FNR == NR { newer[$$1]; print; next } !($$1 in newer)' constraints-spark43.txt constraints.txt > $(VENV43)/constraints.txt
	$(BIN43)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV43)/constraints.txt --editable '.[$(EXTRAS),connect]'
	touch $@

# --- to see it -----------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: install ## Postgres to Delta on this machine: snapshot, live changes, comparison
	$(BIN)/penstock demo

.PHONY: bench
bench: install ## Capture speed beside pg_recvlogical, for inserts; a minute
	$(BIN)/python -m benchmarks.capture --only inserts --no-debezium

# The first run fetches Debezium's jars, 200 MB, into .cache. One workload alone: make bench-capture BENCH_ARGS='--only inserts'.
.PHONY: bench-capture
bench-capture: install ## Capture speed beside pg_recvlogical and Debezium, for all workloads; eight minutes
	$(BIN)/python -m benchmarks.capture $(BENCH_ARGS)

# The first run fetches DuckDB, 60 MB, into .cache, and the drivers of Spark.
.PHONY: bench-snapshot
bench-snapshot: install ## Snapshot speed beside COPY, DuckDB and Spark's JDBC reader; four minutes
	$(BIN)/python -m benchmarks.snapshot $(BENCH_ARGS)

.PHONY: bench-tables
bench-tables: install ## Start time with 1,000 tables
	$(BIN)/python -m benchmarks.many_tables

.PHONY: bench-add-table
bench-add-table: install ## Lag of a running pipeline while a table of a million rows is added to it; five minutes
	$(BIN)/python -m benchmarks.add_table

# The first run fetches Debezium's jars. One part alone: make bench-apply BENCH_ARGS='--only inserts'.
.PHONY: bench-apply
bench-apply: install ## From the WAL through Spark into Delta and Iceberg, beside pg_recvlogical and Debezium; twenty minutes
	$(BIN)/python -m benchmarks.apply $(BENCH_ARGS)

.PHONY: bench-large
bench-large: install ## Memory of a capture while one transaction brings 10 million rows; five minutes
	$(BIN)/python -m benchmarks.large_transaction

.PHONY: bench-large-values
bench-large-values: install ## Memory of Python workers in epochs of 2,200 MB and of millions of rows; half an hour, 10 GB of disk
	$(BIN)/python -m benchmarks.large_epochs $(BENCH_ARGS)

.PHONY: bench-captures
bench-captures: install ## Latency and load of the log, of polling and of triggers; eight minutes
	$(BIN)/python -m benchmarks.captures $(BENCH_ARGS)

# One sink and size alone: make bench-resync BENCH_ARGS='--sink iceberg --rows 20000000'.
.PHONY: bench-resync
bench-resync: install ## Longest epoch of a running pipeline while a table of 2 million rows is resynced; five minutes
	$(BIN)/python -m benchmarks.resync $(BENCH_ARGS)

# Fewer: make bench-memory BENCH_ARGS='--epochs 300 --tables 50'.
.PHONY: bench-memory
bench-memory: install ## Memory of a running pipeline over 1,000 epochs of 300 tables; two hours
	$(BIN)/python -m benchmarks.memory $(BENCH_ARGS)

.PHONY: bench-idle
bench-idle: install ## CPU time of an idle capture; a minute
	$(BIN)/python -m benchmarks.idle

# --- to trust it ---------------------------------------------------------------------------------------------------------

ON_SPARK := '(spark or source)'

SUITES := test-pipelines test-tables test-capture test-recovery test-acceptance test-spark42
LANES ?= 3

# Tests wait for servers and for Spark, so suites share a machine of two cores well. The longest come first. The suite on
# Spark 4.2 makes its environment itself, beside the other suites. Directories only spare collection: the marks decide, and
# tests/conftest.py refuses a marked test in another directory.
.PHONY: test
test: install ## All tests on Spark 4.1, and the tests of the source on Spark 4.2
	$(BIN)/python -m tools.run_suites --lanes $(LANES) $(SUITES)

.PHONY: test-unit
test-unit: install ## Unit and property tests; seconds
	$(BIN)/python -m pytest tests/unit tests/property $(PYTEST_ARGS)

.PHONY: test-long
test-long: install ## Unit and property tests with ten times the random rounds, before a release; some minutes
	PENSTOCK_TEST_ROUNDS=10 $(BIN)/python -m pytest tests/unit tests/property $(PYTEST_ARGS)

.PHONY: test-quick
test-quick: install ## Everything but recovery and acceptance
	$(BIN)/python -m pytest -m 'not recovery and not acceptance and not connect' $(PYTEST_ARGS)

.PHONY: test-capture
test-capture: install ## Everything that needs no Spark: values, spool, capture, contracts
	$(BIN)/python -m pytest -m 'not spark and not source and not connect' tests/unit tests/property tests/contract tests/integration $(PYTEST_ARGS)

.PHONY: test-spark41
test-spark41: install ## Source, sinks and pipeline on Spark 4.1
	$(BIN)/python -m pytest -m $(ON_SPARK) tests/contract tests/integration $(PYTEST_ARGS)

# The same in two halves.
.PHONY: test-pipelines
test-pipelines: install
	$(BIN)/python -m pytest -m $(ON_SPARK) tests/integration/pipeline $(PYTEST_ARGS)

.PHONY: test-tables
test-tables: install
	$(BIN)/python -m pytest -m $(ON_SPARK) tests/contract tests/integration --ignore=tests/integration/pipeline $(PYTEST_ARGS)

.PHONY: test-recovery
test-recovery: install ## Kills and lost state
	$(BIN)/python -m pytest -m recovery tests/recovery $(PYTEST_ARGS)

.PHONY: test-acceptance
test-acceptance: install ## The whole product as a user runs it
	$(BIN)/python -m pytest -m acceptance tests/acceptance $(PYTEST_ARGS)

.PHONY: test-verify
test-verify: install ## verify under a hundred rounds of writes, and in a million rows; half an hour
	PENSTOCK_TEST_VERIFY_ROUNDS=100 PENSTOCK_TEST_VERIFY_ROWS=1000000 $(BIN)/python -m pytest -s tests/integration/pipeline/test_verify.py tests/integration/pipeline/test_verify_running.py $(PYTEST_ARGS)

.PHONY: test-kills
test-kills: install ## Kill a process 20 times in a snapshot of two million rows, and 20 times in a run; half an hour
	PENSTOCK_TEST_KILLS=20 $(BIN)/python -m pytest tests/recovery/test_kill_snapshot.py tests/recovery/test_kill.py -s $(PYTEST_ARGS)

# pytest itself fails when it selects no test.
.PHONY: test-spark42
test-spark42: install-spark42 ## The tests of the Spark source on Spark 4.2
	$(BIN42)/python -m pytest -m source tests/integration $(PYTEST_ARGS)

# Not a part of `make test`: to install this Spark takes longer than the tests do.
.PHONY: test-spark43
test-spark43: install-spark43 ## The few tests of the source that run on Spark 4.3, and those over Spark Connect
	$(BIN43)/python -m pytest -m 'connect or (source and newest)' $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: install ## Damaged streams for the decoder, FUZZ_CASES of them in FUZZ_PROCESSES processes; hours. FUZZ_ARGS='--subject values': texts
	$(BIN)/python -m tests.fuzz --cases $(FUZZ_CASES) --processes $(FUZZ_PROCESSES) $(FUZZ_ARGS)

.PHONY: coverage
coverage: install ## Unit to integration tests with branch coverage
	$(BIN)/python -m pytest -m 'not recovery and not acceptance and not connect' --cov --cov-report=term --cov-report=html $(PYTEST_ARGS)

.PHONY: lint
lint: install ## Style, formatting, the direction of imports, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m tools.idiom --limit src=1 --limit tests=1 --limit docs=1 --limit top=1

.PHONY: types
types: install ## mypy, strict, over src, tests and benchmarks
	$(BIN)/mypy

.PHONY: format
format: install ## Let ruff format and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# --- to ship it ----------------------------------------------------------------------------------------------------------

.PHONY: docs
docs: install ## Write the generated reference pages under docs/reference
	$(BIN)/python -m tools.reference_pages docs/reference

.PHONY: package
package: install ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build

.PHONY: clean
clean: ## Remove environments, caches and build results
	rm -rf $(VENV) $(VENV42) $(VENV43) .cache build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
