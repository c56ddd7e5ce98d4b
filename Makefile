# Every target sets up what it needs: Python 3.11 or newer and make are enough.
PYTHON ?= python3
BIN := .venv/bin
QUIET := --quiet --quiet --disable-pip-version-check

.PHONY: run test test-integrations check docs bench format clean

# A ring all-reduce of this model takes 41 ms at 50 Mbit/s, a few times what a step computes: a slow network, for
# which most strategies are made.
DEMO := bsp,local_sgd,diloco,selsync,osp,ssd_sgd,asp,ssp,oscars
run: .venv/ready  ## train digits under nine strategies, four workers, an emulated slow network; a table and a verdict
	$(BIN)/offbeat compare digits --workers 4 --bandwidth 50mbit --target 0.97 --epochs 8 --evaluate-every 11 \
		--strategies "$(DEMO)" --out runs/demo --force

test: .venv/ready  ## all tests, three files at a time: many of them wait for processes
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test-integrations: .venv-integrations/ready  ## loops of Accelerate, Transformers, TRL, Lightning and Ray, in an environment of their own
	env -u PYTHONDONTWRITEBYTECODE .venv-integrations/bin/pytest -n 2 --dist loadfile tests/integrations

docs: .venv-docs/ready  ## the documentation site, in build/site; a warning or a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html; browsers search in a site only from a server: python3 -m http.server -d build/site"

check: .venv/ready  ## lint and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/ready  ## all benchmarks that run on one machine without a GPU; needs root, for network namespaces
	$(BIN)/python -m benchmarks run bsp_vs_ddp
	$(BIN)/python -m benchmarks run attach_cost
	$(BIN)/python -m benchmarks run starting
	$(BIN)/python -m benchmarks run scale
	$(BIN)/python -m benchmarks run prediction
	$(BIN)/python -m benchmarks run plan
	$(BIN)/python -m benchmarks run shares
	$(BIN)/python -m benchmarks run server
	$(BIN)/python -m benchmarks run soak
	$(BIN)/python -m benchmarks run overlap
	$(BIN)/python -m benchmarks run overlap_accuracy
	$(BIN)/python -m benchmarks run selsync_time
	$(BIN)/python -m benchmarks run selsync_norm
	$(BIN)/python -m benchmarks run selsync_ablation
	$(BIN)/python -m benchmarks run osp_ablation
	$(BIN)/python -m benchmarks run oscars
	$(BIN)/python -m benchmarks run gssp
	$(BIN)/python -m benchmarks run gssp_ablation
	$(BIN)/python -m benchmarks run codecs
	$(BIN)/python -m benchmarks run codecs_time
	$(BIN)/python -m benchmarks run papers --models lenet5 --jobs 2
	$(BIN)/python -m benchmarks run papers --table

format: .venv/ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(QUIET) --no-compile -c constraints.txt -e '.[test,check]'
	touch $@

.venv-integrations/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/pip install $(QUIET) --no-compile -c constraints.txt \
		-e '.[test,accelerate,lightning,transformers,trl,ray]'
	touch $@

# The site reads the sources, so neither Offbeat nor torch is installed for it.
.venv-docs/ready: docs/site/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install $(QUIET) --no-compile -r docs/site/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-integrations .venv-docs runs build dist
