import importlib
import inspect
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from anndata import AnnData

import scforge
from scforge.cli import main
from scforge.estimators import Encoder
from scforge.eval.base import BENCHMARKS
from scforge.finetuning.base import TASKS
from scforge.models.registry import MODELS
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import OBJECTIVES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "extending",
    # Its report draws halves of the cells again and again.
    pytest.param("extending_model", marks=pytest.mark.exhaustive),
    "troubleshooting",
    "migration",
    "user_guide",
)
N_CELLS, N_GENES = 240, 2_500

_FENCE = re.compile(r"^```(?P<language>python|yaml|toml|bash)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"^% not run: \S.*\n\Z", re.MULTILINE)
_NAME = re.compile(r"# ([\w.]+\.(?:py|yaml|toml))\n")


class Block(NamedTuple):
    language: str
    text: str
    place: str
    runs: bool
    file: str | None


def blocks(page):
    """Return the blocks of a page, in order; ``% not run: why`` above one says that it is compiled only."""
    text = (DOCS / f"{page}.md").read_text()
    found = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        place = f"{page}.md, line {before.count(chr(10)) + 2}"
        named = _NAME.match(fence["text"])  # the file that it is, by its first line
        runs = _NOT_RUN.search(before) is None
        found.append(Block(fence["language"], fence["text"], place, runs, named and named[1]))
    return found


@pytest.fixture(scope="module")
def few_cells():
    adata = scforge.datasets.pbmc3k()
    cells = np.flatnonzero(adata.obs["cell_type"].notna())
    cells = np.sort(np.random.default_rng(0).choice(cells, N_CELLS, replace=False))
    sizes = adata.obs["cell_type"].iloc[cells].value_counts()
    cells = cells[adata.obs["cell_type"].iloc[cells].isin(sizes.index[sizes >= 5])]  # benchmarks have five folds
    genes = np.argsort(-np.asarray(adata.X.sum(axis=0)).ravel(), kind="stable")[:N_GENES]
    return adata[cells, np.sort(genes)].copy()


@pytest.fixture
def scratch(tmp_path, monkeypatch, few_cells):
    """An empty working directory, with the few cells for PBMC 3k; what pages register and import is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(scforge.datasets, "pbmc3k", few_cells.copy)
    before = set(sys.modules)
    yield tmp_path
    for registry in (BENCHMARKS, MODELS, OBJECTIVES, TASKS, TOKENIZERS):
        for name, entry in list(registry._entries.items()):
            if entry.__module__ not in before and not entry.__module__.startswith("scforge."):
                del registry._entries[name]
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def run_file(name):
    module = importlib.import_module(Path(name).stem)
    for label, test in inspect.getmembers(module, inspect.isfunction):
        if label.startswith("test_"):
            test()


def run_shell(text):
    """Run the lines that call scforge in this process, which knows what a page has registered."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["scforge"]:
            assert main(words[1:]) == 0, line
        else:
            assert not words or words[0] in ("pip", "python"), line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, scratch):
    names = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            code = compile(block.text, block.place, "exec")
        if not block.runs:
            continue
        if block.file is not None:
            Path(block.file).write_text(block.text)
        if block.language == "toml":
            for group in tomllib.loads(block.text)["project"]["entry-points"].values():
                for point in group.values():
                    module, _, attribute = point.partition(":")
                    assert hasattr(importlib.import_module(module), attribute), block.place
        elif block.language == "bash":
            run_shell(block.text)
        elif block.language == "python" and block.file is not None:
            run_file(block.file)
        elif block.language == "python":
            exec(code, names)


def test_every_page_is_covered():
    pages = [page if isinstance(page, str) else page.values[0] for page in PAGES]
    assert {path.stem for path in DOCS.glob("extending*.md")} <= set(pages)
    for page in pages:
        assert any(block.language == "python" for block in blocks(page)), page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
def test_the_readme_runs_on_10000_cells(tmp_path, monkeypatch):
    """Neighbors are approximated from 8,192 cells on, by packages that fit together in some versions only."""
    rng = np.random.default_rng(0)
    cells = scforge.datasets.pbmc3k()
    cells = cells[cells.obs["cell_type"].notna()]
    rows = rng.integers(cells.n_obs, size=10_500)
    genes = np.argsort(-np.asarray(cells.X.sum(axis=0)).ravel(), kind="stable")[:500]
    counts = cells.X[rows][:, np.sort(genes)]
    counts.data = rng.binomial(counts.data.astype(int), 0.8).astype("float32")
    adata = AnnData(counts, var=cells.var.iloc[np.sort(genes)], layers={"counts": counts})
    adata.obs["cell_type"] = cells.obs["cell_type"].array[rows]
    adata.obs["donor"] = pd.Categorical(rng.choice(["a", "b", "c", "d"], adata.n_obs))
    new = adata[10_000:].copy()
    monkeypatch.chdir(tmp_path)
    adata[:10_000].copy().write_h5ad("cells.h5ad")
    train = Encoder.train

    def short(self, max_epochs=None, **options):
        train(self, 1, **(options | {"progress_bar": False, "accelerator": "cpu"}))

    monkeypatch.setattr(Encoder, "train", short)
    monkeypatch.setattr(plt, "show", plt.close)
    names = {}
    block = next(block for block in blocks("../README") if block.language == "python")
    text, report, _ = block.text.partition("report = ")  # which takes minutes, with exact neighbors of 5,000 cells
    assert report
    exec(compile(text, block.place, "exec"), names)
    adata, annotator = names["adata"], names["annotator"]
    assert adata.obsm["X_umap"].shape == (10_000, 2)
    annotator.predict(adata, majority_voting=True)
    sc.tl.leiden(adata, flavor="igraph", n_iterations=2, directed=False)
    assert adata.obs["leiden"].nunique() > 2
    truth = new.obs.pop("cell_type")
    names["model"].get_latent_representation(new)
    sc.tl.ingest(new, adata, obs="cell_type", embedding_method="umap")
    assert (new.obs["cell_type"].astype(str) == truth.astype(str)).mean() > 0.5
