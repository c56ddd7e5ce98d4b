# Every target sets up what it needs: Python 3.11 or newer and make are enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test check bench format clean

run: .venv/ready  ## train digits under every strategy, four workers, an emulated slow network; a table
	$(BIN)/offbeat compare digits --workers 4 --bandwidth 50mbit --target 0.97 --epochs 8 --out runs/demo --force

test: .venv/ready  ## all tests, three files at a time: many of them wait for processes
	$(BIN)/pytest -n 3 --dist loadfile

check: .venv/ready  ## lint and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/ready  ## the benchmarks; needs root, for network namespaces. Results go to benchmarks/results
	$(BIN)/python -m benchmarks.bsp_vs_ddp
	$(BIN)/python -m benchmarks.attach_cost
	$(BIN)/python -m benchmarks.starting
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.prediction
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.shares
	$(BIN)/python -m benchmarks.server
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.overlap_accuracy
	$(BIN)/python -m benchmarks.selsync_time
	$(BIN)/python -m benchmarks.selsync_norm
	$(BIN)/python -m benchmarks.selsync_ablation
	$(BIN)/python -m benchmarks.osp_ablation
	$(BIN)/python -m benchmarks.oscars
	$(BIN)/python -m benchmarks.gssp
	$(BIN)/python -m benchmarks.gssp_ablation
	$(BIN)/python -m benchmarks.codecs
	$(BIN)/python -m benchmarks.codecs_time
	$(BIN)/python -m benchmarks.papers --models lenet5 --jobs 2
	$(BIN)/python -m benchmarks.papers --table

format: .venv/ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	touch $@

clean:
	rm -rf .venv runs build
