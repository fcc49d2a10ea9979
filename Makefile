# `make demo` and `make test` work in a fresh clone: both rest on `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := runs/demo
# Of the site: pages, and what they link to. `.venv` beside them would take the generator minutes.
PAGES := README.md RESULTS.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff LICENSE docs benchmarks examples results src
STAGE := build/pages

.PHONY: help setup demo test slow trust docs pages site lint format clean

help:
	@echo "make demo       train on glyphs (about two minutes), evaluate, draw a memory, recall from it"
	@echo "make test       the whole suite, ruff, basedpyright, shape checks"
	@echo "make slow       checks that take minutes: compiled steps against eager ones"
	@echo "make trust      kills, faults, mutated and hostile files: 20 minutes; files results/trust.json"
	@echo "make docs       rewrite figures, tables and pages of experiments from the records"
	@echo "make site       the pages as a site with search and API, in site/; its links are checked"
	@echo "make setup      .venv with everything installed"
	@echo "make format     ruff format and import order"
	@echo "make clean      remove .venv, caches and the demo's run"

setup: $(STAMP)

# torch comes first and alone: the constraint keeps later packages from replacing it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup
	@test ! -e $(RUN) || test -f $(RUN)/config.yaml || { echo "$(RUN) is no run folder: not replaced" >&2; exit 2; }
	rm -rf $(RUN)
	$(BIN)/kanerva train --preset glyphs --run $(RUN)
	$(BIN)/kanerva evaluate $(RUN)
	@printf '\npictures:\n%s\n' $(RUN)/reconstructions.png
	@$(BIN)/kanerva memory $(RUN)
	@$(BIN)/kanerva recall $(RUN) --cue lower_half_hidden --steps 1
	@printf '\nnext: . $(BIN)/activate, then the README; and see a memory live: kanerva explore $(RUN)\n'

test: setup lint
	$(BIN)/pytest -q -n auto --maxprocesses 4

slow: setup
	$(BIN)/pytest -q -m slow

trust: setup
	$(BIN)/python -W ignore tests/trust/run.py

docs: setup
	$(BIN)/python -m kanerva.lab.quote README.md RESULTS.md SECURITY.md docs/*.md docs/results/*.md benchmarks/*.md
	$(BIN)/python -m kanerva.lab.benchmark.report docs/speed.png results/bench/throughput*.json
	$(BIN)/python -m kanerva.lab.page docs/experiments results/reproduce
	$(BIN)/python -m kanerva.lab.capacity docs/capacity.png results/mnist/kpp-store*-s0.json \
	  results/mnist/kpp-bits-bits*-s0.json results/mnist/kpp-*empty-s?.json results/reproduce/gist-mnist.json results/reproduce/lossless-mnist.json

# The generator is an extra: `make test` does without it.
$(VENV)/.site: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[site]'
	touch $@

pages:
	mkdir -p $(STAGE)
	cp -r $(PAGES) $(STAGE)
	mv $(STAGE)/docs/nav.yml $(STAGE)/.nav.yml
	rm -rf $(STAGE)/src/*.egg-info
	find $(STAGE) -name '*.json' -delete -o -name '*.safetensors' -delete -o -name '*.pyc' -delete

site: $(VENV)/.site
	rm -rf build/pages site
	$(MAKE) --silent pages
	$(BIN)/zensical build --clean --strict
	$(BIN)/pytest -q tests/test_site.py
	@printf '\nsite/index.html; with search: $(BIN)/python -m http.server -d site\n'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs/demo .pytest_cache .ruff_cache .cache site build dist src/*.egg-info
