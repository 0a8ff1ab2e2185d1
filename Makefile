# One word per job. Each job installs its dependencies into $(VENV) on first use.
VENV ?= .venv
export VENV
INSTALL := sh tools/install.sh
# A process a core, up to four, each with imports and fixtures of its own, and one thread, lest they wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMBA_NUM_THREADS=1
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-exhaustive gpu gpu-dry scale-dry test-census test-cz results lint docs notebooks constraints clean

help: ## Show the jobs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

quickstart: ## Install scforge, integrate and annotate bundled cells, write a UMAP and a report to quickstart/
	@$(INSTALL)
	$(VENV)/bin/scforge quickstart --output quickstart --overwrite

test: ## Run the tests, in minutes; ARGS="-k tokenizer" passes options to pytest
	@$(INSTALL) test
	$(ONE_THREAD) $(VENV)/bin/pytest $(PARALLEL) $(ARGS)

test-all: ## Run the slow tests as well (kills, limits of memory, every variant), and properties on more examples
	@$(INSTALL) test
	$(ONE_THREAD) $(VENV)/bin/pytest $(PARALLEL) --hypothesis-profile thorough -m "not exhaustive" $(ARGS)

test-exhaustive: ## Run slow tests at full size, which takes an hour
	@$(INSTALL) test
	$(ONE_THREAD) $(VENV)/bin/pytest -m exhaustive $(ARGS)

gpu: ## Measure a GPU and run the tests that need one, in 10 minutes; the table goes to docs/scaling.md
	@$(INSTALL) test
	@# flash-attn is a peer of the benchmark, where there is a wheel; building it takes longer than all the rest.
	@timeout 60 uv pip install -q --python $(VENV)/bin/python --only-binary flash-attn flash-attn 2>/dev/null || true
	$(VENV)/bin/python benchmarks/gpu.py --budget 330
	$(VENV)/bin/python benchmarks/gpu.py --docs docs/scaling.md
	timeout 210 $(VENV)/bin/pytest -m gpu tests/test_gpu.py $(ARGS)

gpu-dry: ## Run the benchmark of a GPU on the CPU, in tiny sizes
	@$(INSTALL) test
	$(ONE_THREAD) $(VENV)/bin/python benchmarks/gpu.py --tiny

scale-dry: ## Run the benchmark of large stores on 3,000 cells
	@$(INSTALL) test
	$(ONE_THREAD) $(VENV)/bin/python benchmarks/scale.py --tiny

# What meets the tables of pandas, whose version 2 the clients of the Census need.
WITH_PANDAS := census census_filters checks conversion readers readers_h5ad sources sampling_splits \
	statistics_selection store store_collections store_damage
# tiledbsoma has no wheels for Python 3.14 yet.
test-census: VENV := .venv-census
test-census: ## Run the tests of the Census, and of what else meets pandas 2, in an environment of their own
	@PYTHON=$${PYTHON:-python3.12} $(INSTALL) test census
	$(ONE_THREAD) $(VENV)/bin/pytest $(PARALLEL) $(WITH_PANDAS:%=tests/data/test_%.py) tests/datasets \
		tests/perturbation/test_keys.py $(ARGS)

# hnswlib is built from source, and has been with Python 3.12 only.
test-cz: VENV := .venv-cz
test-cz: ## Run the tests of the adapter to cz-benchmarks, with the real package, in an environment of their own
	@PYTHON=$${PYTHON:-python3.12} $(INSTALL) test cz
	$(ONE_THREAD) $(VENV)/bin/pytest tests/eval/test_cz_benchmarks.py $(ARGS)

results: ## Rewrite the tables and figures of the documentation from benchmarks/results, and measure nothing
	@$(INSTALL) test
	$(VENV)/bin/python benchmarks/embedding_quality.py --docs docs/embeddings.md
	$(VENV)/bin/python benchmarks/transfer.py --docs docs/transfer.md
	$(VENV)/bin/python benchmarks/label_transfer.py --docs docs/reference_mapping.md docs/transfer.md README.md
	$(VENV)/bin/python benchmarks/unknown_types.py --docs docs/reference_mapping.md
	$(VENV)/bin/python benchmarks/annotation.py --docs docs/fine_tuning.md
	$(VENV)/bin/python benchmarks/integration.py --docs docs/embeddings.md README.md
	$(VENV)/bin/python benchmarks/integration_labels.py --docs docs/embeddings.md
	$(VENV)/bin/python benchmarks/integration_objective.py --docs docs/objectives.md
	$(VENV)/bin/python benchmarks/integration_finetuning.py --docs docs/reference_mapping.md
	$(VENV)/bin/python benchmarks/perturbation_effects.py --docs docs/fine_tuning.md
	$(VENV)/bin/python benchmarks/in_silico.py --docs docs/in_silico.md
	$(VENV)/bin/python benchmarks/scale.py --docs docs/scaling.md
	$(VENV)/bin/python benchmarks/figures.py docs/_static/benchmarks

lint: ## Check style, imports between layers, types, and wording
	@$(INSTALL) dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/check_words.py

docs: ## Build the documentation into docs/_build/html and check its links; run make notebooks before to show outputs
	@$(INSTALL) docs
	$(VENV)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	$(VENV)/bin/python tools/check_links.py docs/_build/html README.md CONTRIBUTING.md CHANGELOG.md notebooks/*.ipynb

# Copies are run, so that those in notebooks/ stay without outputs, and figures are kept whatever the shell says of
# matplotlib. Data sets that are not bundled are read from SCFORGE_DATA, or from a folder next to the checkout if it is not
# set; notebooks use bundled data instead of a missing file, and print so.
notebooks: ## Run every notebook from top to bottom; what they print goes to build/notebooks
	@$(INSTALL) test
	rm -rf build/notebooks
	mkdir -p build/notebooks
	cp notebooks/*.ipynb build/notebooks
	env -u MPLBACKEND SCFORGE_DATA="$${SCFORGE_DATA:-$(abspath ../shared/data/cells)}" $(ONE_THREAD) \
		$(VENV)/bin/pytest $(PARALLEL) --durations=0 --durations-min=5 \
		-p nbmake --nbmake --nbmake-timeout=900 --overwrite build/notebooks/*.ipynb

PINS := uv pip compile -q --universal --python-version 3.12 --no-header --no-annotate --no-emit-index-url
constraints: ## Renew constraints.txt and those of the extras census and cz; needs uv
	{ echo '# Versions that are tested together, for every extra except census and cz. Renew with: make constraints'; \
	  $(PINS) --extra all --group dev pyproject.toml; } > constraints.txt.new
	mv constraints.txt.new constraints.txt
	{ echo '# Versions that are tested together with the extra census. Renew with: make constraints'; \
	  $(PINS) --extra census --group test pyproject.toml; } > constraints-census.txt.new
	mv constraints-census.txt.new constraints-census.txt
	{ echo '# Versions that are tested together with the extra cz. Renew with: make constraints'; \
	  $(PINS) --extra cz --group test pyproject.toml; } > constraints-cz.txt.new
	mv constraints-cz.txt.new constraints-cz.txt

clean: ## Remove what the jobs made, except the environment
	rm -rf quickstart build docs/_build docs/generated docs/notebooks lightning_logs
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
