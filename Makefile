# One command for each thing a person does with a clone. Everything lands in .venv; nothing else is touched.
#
#   make demo      install, then show the whole road: gateway, sandbox, commands, files
#   make install   the gateway alone, editable: .venv/bin/sandgate
#   make test      lint, then every test
#   make again     the tests that failed at the last run, one after the other
#   make lint      format, lint, types, generated code, the contract in protos/
#   make bench     latencies and throughput as ratios to a baseline of the same run
#
# PYTHON=/path/to/python3 chooses the interpreter of .venv; TESTS="..." narrows `make test` to what pytest should get.

VENV := .venv
BIN := $(VENV)/bin
PROJECTS := pyproject.toml plugins/api/pyproject.toml plugins/process/pyproject.toml plugins/docker/pyproject.toml plugins/rock/pyproject.toml \
	plugins/opensandbox/pyproject.toml
EDITABLE := -e plugins/api -e . -e plugins/process -e plugins/docker -e plugins/rock -e plugins/opensandbox
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

# The system's own python3 first: a newer one beside it may lack its venv module.
PYTHON ?=
CANDIDATES = $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)
recent_enough = $(shell $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(1))
can_make_venv = $(shell $(1) -c 'import ensurepip, venv' >/dev/null 2>&1 && echo $(1))
RECENT = $(strip $(foreach each,$(CANDIDATES),$(call recent_enough,$(each))))
USABLE = $(strip $(foreach each,$(RECENT),$(call can_make_venv,$(each))))
# $(error) and not a failing recipe: it ends with one line.
CHOSEN = $(or $(firstword $(USABLE)),$(if $(RECENT),\
	$(error needs python3-venv: apt-get install python3-venv),\
	$(error needs Python 3.11 or newer (tried: $(CANDIDATES)): apt-get install python3 python3-venv, or give PYTHON=/path/to/python3)))

# Every worker of the suite runs a gateway of its own; beyond a handful they only crowd each other.
WORKERS ?= auto
TESTS ?=
BENCH ?=

AGAIN = $(BIN)/pytest -n 0 --last-failed --last-failed-no-failures none
PYTEST = $(BIN)/pytest -n $(WORKERS) --maxprocesses 4 --dist loadgroup
# Users' ways through a gateway once more on containers; what failed there is remembered apart. Skipped without an engine.
ON_DOCKER := --backend docker -o cache_dir=.pytest_cache/docker \
	$(addprefix tests/journeys/test_,$(addsuffix .py,journey commands files pausing endurance lost_sandbox access secrets ports)) \
	$(addprefix tests/client/native/test_,$(addsuffix .py,sandbox pausing reattach)) \
	$(addprefix tests/client/test_,$(addsuffix .py,compatibility exec logs))
# And on an OpenSandbox server: every official SDK, and what is different where the core holds the ways to agents. Two of
# them, as each worker has a server of its own, and all of those list and keep what they have on one engine.
ON_OPENSANDBOX := --maxprocesses 2 --backend opensandbox -o cache_dir=.pytest_cache/opensandbox \
	$(addprefix tests/journeys/test_,$(addsuffix .py,journey endurance lost_sandbox pausing two_gateways))

.PHONY: install demo test again lint bench released clean

install: $(VENV)/.installed

demo: $(VENV)/.demo
	@$(BIN)/sandgate demo

# All parts, whatever becomes of the first: `again` is to know all that failed.
test: lint
	@failed=0; \
	$(PYTEST) $(TESTS) || failed=1; \
	$(if $(TESTS),,$(PYTEST) $(ON_DOCKER) || failed=1; $(PYTEST) $(ON_OPENSANDBOX) || failed=1;) \
	exit $$failed

# Only what failed at the last run, one after the other. A part in which nothing failed is no failure (pytest ends with
# status 5); that nothing failed in any is, as then something else did.
again: $(VENV)/.dev
	@$(AGAIN); first=$$?; \
	$(AGAIN) $(ON_DOCKER); second=$$?; \
	$(AGAIN) $(ON_OPENSANDBOX); third=$$?; \
	for status in $$first $$second $$third; do [ $$status = 0 ] || [ $$status = 5 ] || exit $$status; done; \
	[ $$first = 0 ] || [ $$second = 0 ] || [ $$third = 0 ]

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python protos/generate.py --check
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb

bench: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python -m bench $(BENCH)

# At a release, and only then: what `make lint` compares the contract with from now on.
released: $(VENV)/.dev
	$(BIN)/buf build --exclude-source-info -o protos/released.binpb

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One pip call for each stamp: pip sees all that is wanted together and resolves once.
$(VENV)/.installed: $(VENV)/.made $(PROJECTS)
	@echo "Installing sandgate into $(VENV)"
	@$(PIP) $(EDITABLE)
	@touch $@

$(VENV)/.demo: $(VENV)/.made $(PROJECTS)
	@echo "Installing sandgate and the E2B SDK into $(VENV), which takes about a minute"
	@$(PIP) $(EDITABLE) --group demo
	@touch $@ $(VENV)/.installed

$(VENV)/.dev: $(VENV)/.made $(PROJECTS)
	@echo "Installing sandgate and its development tools into $(VENV), which takes some minutes"
	@$(PIP) $(EDITABLE) --group dev
	@touch $@ $(VENV)/.installed $(VENV)/.demo

# A pip older than 25.1, as stable distributions carry it, does not know --group. The stamp, and not the interpreter,
# says that .venv is whole: an interrupted first try is made anew.
$(VENV)/.made:
	@$(CHOSEN) -m venv --clear $(VENV)
	@$(PIP) 'pip>=25.1'
	@touch $@
