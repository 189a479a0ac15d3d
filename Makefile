# Each target stands alone: what it needs (.venv, dependencies, a broker) it gets first, and only if it is missing.

# the first Python that is new enough; looked for only when .venv has to be made
PYTHON = $(firstword $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$$p"; done; true))
BIN := .venv/bin
INSTALLED := .venv/installed
# what is measured beside ours has a venv of its own, so that its versions are no matter of ours
BENCH_BIN := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/installed
# for pytest, as in: make test ARGS="-k journal"
ARGS :=
# most tests wait for delays and for programs to start, so three processes share the broker, slow files first;
# PARALLEL= for one process
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test check lint broker definitions bench bench-quick clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: $(INSTALLED) ## show it all in a minute: retries, dead letters, replay
	@$(BIN)/rabbitdlq broker run -- $(BIN)/rabbitdlq demo

test: $(INSTALLED) ## run all tests, with a broker of their own if none is given
	@$(BIN)/pytest $(PARALLEL) $(ARGS)

check: lint test ## check format, lint and types, then run all tests

lint: $(INSTALLED) ## check format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

broker: $(INSTALLED) ## start a private RabbitMQ node and print its URLs (ends with: .venv/bin/rabbitdlq broker down)
	@$(BIN)/rabbitdlq broker up

# The accounts in definitions/ are for the demo on loopback, so their passwords are no secrets.
definitions: $(INSTALLED) ## write definitions/ anew from rabbitdlq/demo/orders.toml
	@for file in orders:4.x orders-3.x:3.x; do \
		RABBITDLQ_PRODUCER_PASSWORD=producer RABBITDLQ_CONSUMER_PASSWORD=consumer RABBITDLQ_OPERATOR_PASSWORD=operator \
		$(BIN)/rabbitdlq --topology rabbitdlq/demo/orders.toml topology definitions --users \
			--broker $${file#*:} >definitions/$${file%:*}.json.part && \
		mv definitions/$${file%:*}.json.part definitions/$${file%:*}.json || exit 1; \
	done

# ARGS as in: make bench ARGS="--only consume --peers pika_select --json bench.json"; see python -m tests.benchmarks --help
bench: $(BENCH_INSTALLED) ## measure throughput, latency and memory beside other libraries (an hour)
	@$(BENCH_BIN)/rabbitdlq broker run -- $(BENCH_BIN)/python -m tests.benchmarks $(ARGS)

bench-quick: $(BENCH_INSTALLED) ## the same beside plain aio-pika only, in two minutes
	@$(BENCH_BIN)/rabbitdlq broker run -- $(BENCH_BIN)/python -m tests.benchmarks --quick $(ARGS)

clean: ## take the private node down, remove .venv and caches
	@if [ -x $(BIN)/rabbitdlq ]; then $(BIN)/rabbitdlq broker down; fi
	rm -rf .venv .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find rabbitdlq tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Only again when pyproject.toml changed. A .venv that is broken, or was moved here from elsewhere, is made anew.
$(INSTALLED): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory .venv/pyvenv.cfg
	@echo "installing rabbitdlq and its dependencies into .venv" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(BENCH_INSTALLED): pyproject.toml
	@$(BENCH_BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory .venv-bench/pyvenv.cfg
	@echo "installing rabbitdlq and what it is measured beside into .venv-bench" >&2
	@$(BENCH_BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

.PHONY: .venv/pyvenv.cfg .venv-bench/pyvenv.cfg
.venv/pyvenv.cfg .venv-bench/pyvenv.cfg:
	@rm -rf $(@D)
	@python="$(PYTHON)"; [ -n "$$python" ] || { \
		echo "Python 3.11 or later is needed, as python3 on the PATH." >&2; exit 1; }; \
	if ! "$$python" -c "import ensurepip" 2>/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing python3-venv" >&2; \
		apt-get -qq update >&2; \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3-venv >/dev/null; \
	fi; \
	"$$python" -m venv $(@D) || { \
		rm -rf $(@D); \
		echo "$$python makes no virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
