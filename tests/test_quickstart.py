import json
from pathlib import Path

import anndata as ad
import matplotlib

matplotlib.use("Agg")

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import scforge
from scforge import _quickstart
from scforge.cli import main
from scforge.estimators import Encoder

# umap-learn says so whenever it is seeded.
pytestmark = pytest.mark.filterwarnings("ignore:.*n_jobs value.*:UserWarning")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quickstart on some cells of each batch, run by its command."""
    folder = tmp_path_factory.mktemp("quickstart")
    cells = scforge.datasets.lung_cell_lines()
    rows = cells.obs.reset_index().groupby(["batch", "cell_line"], observed=True).head(20).index
    genes = np.argsort(-np.asarray(cells.X.sum(axis=0)).ravel(), kind="stable")[:600]
    cells = cells[rows, np.sort(genes)].copy()
    train = Encoder.train

    def short(self: Encoder, max_epochs: int | None = None, **options) -> None:
        train(self, 2, **(options | {"progress_bar": False, "accelerator": "cpu"}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scforge.datasets.lung_cell_lines", lambda: cells.copy())
        patch.setattr(Encoder, "train", short)
        patch.setattr(_quickstart.Annotation, "n_draws", 10)
        assert main(["quickstart", "--output", str(folder / "result")]) == 0
    assert not plt.get_fignums(), "figures are left open"
    return folder / "result"


@pytest.mark.slow
def test_files(result: Path) -> None:
    reports = {f"report.{ending}" for ending in ("md", "html", "json", "csv")}
    files = {"blood.png", "cells.h5ad", "model", "quickstart.json", "umap.png"}
    assert {path.name for path in result.iterdir()} == files | reports
    picture = matplotlib.image.imread(result / "umap.png")
    # Two rows of three embeddings.
    for half in np.array_split(picture[..., :3], 2, axis=0):
        for panel in np.array_split(half, 3, axis=1):
            assert (panel.min(axis=-1) < 0.9).mean() > 0.005


@pytest.mark.slow
def test_cells_and_model(result: Path) -> None:
    cells = ad.read_h5ad(result / "cells.h5ad")
    new = (cells.obs["batch"] == "sc_dropseq").to_numpy()
    assert cells.obs["scforge_cell_line_transferred"].notna().tolist() == new.tolist()
    embeddings = [cells.obsm[key] for key in ("X_scforge", "X_scforge_1", "X_scforge_2")]
    assert np.abs(embeddings[0] - embeddings[1]).max() > 1e-3, "seeds differ"
    model = Encoder.load(result / "model", cells[~new].copy())
    np.testing.assert_allclose(model.get_latent_representation(key_added=None), embeddings[0][~new], atol=1e-4)
    assert "sc_dropseq" not in model.adata.obs["batch"].cat.categories, "the new sample was not trained on"


@pytest.mark.slow
def test_report(result: Path) -> None:
    content = json.loads((result / "report.json").read_text())
    rows = {(row["benchmark"], row["name"]): row for row in content["rows"]}
    methods = {"integration": 3, "annotation": 4}
    assert {name: sum(row["benchmark"] == name for row in content["rows"]) for name in methods} == methods
    for benchmark, model in (
        ("integration", "scforge, new sample mapped"),
        ("annotation", "scforge, label transfer"),
    ):
        assert rows[benchmark, model]["kind"] == "model"
        assert sum(model in verdict for verdict in content["verdicts"]) == 1
    assert rows["annotation", "logistic regression on genes"]["scores"]["accuracy"] > 0.7


def test_scores_of_annotations() -> None:
    truth = pd.Series(["a", "a", "b", "b"])
    scores = _quickstart.Annotation().run(pd.Series(["a", "c", "b", "b"]), truth)
    assert scores["accuracy"] == 0.75
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 1) / 2), "a class that no cell has is no class of the mean"
    draws = _quickstart.Annotation().resampled(pd.Series(["a", "c", "b", "b"]), truth, n=50, seed=0)
    assert draws.shape == (50, 2)
    assert 0 < draws["accuracy"].std() < 0.5
