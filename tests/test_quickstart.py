import json
from pathlib import Path

import anndata as ad
import matplotlib

matplotlib.use("Agg")

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest

from scforge import _quickstart
from scforge.cli import main
from scforge.estimators import Encoder

# umap-learn says so whenever it is seeded.
pytestmark = pytest.mark.filterwarnings("ignore:.*n_jobs value.*:UserWarning")


@pytest.fixture(scope="module")
def result(pbmc: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quickstart on 400 cells, run by its command; its output is in out.txt."""
    folder = tmp_path_factory.mktemp("quickstart")
    labels = pbmc.obs["cell_type"]
    common = labels.isin(labels.value_counts().index[:4]) | labels.isna()
    cells = pbmc[common.to_numpy()][:400].copy()
    cells.obs["cell_type"] = cells.obs["cell_type"].cat.remove_unused_categories()
    train = Encoder.train

    def short(self: Encoder, max_epochs: int | None = None, **options) -> None:
        train(self, 2, **(options | {"progress_bar": False, "accelerator": "cpu"}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scforge.datasets.pbmc3k", lambda: cells.copy())
        patch.setattr(Encoder, "train", short)
        patch.setattr(_quickstart, "_TOKENS", 32)
        assert main(["quickstart", "--output", str(folder / "result")]) == 0
    assert not plt.get_fignums(), "figures are left open"
    return folder / "result"


@pytest.mark.slow
def test_what_is_there(result: Path) -> None:
    files = {path.name for path in result.iterdir()}
    reports = {f"report.{ending}" for ending in ("md", "html", "json", "csv")}
    assert files == {"light", "pbmc3k_scforge.h5ad", "transformer", "umap.png", *reports}
    picture = matplotlib.image.imread(result / "umap.png")
    # Embeddings above and curves below, on the left and on the right.
    for half in np.array_split(picture[..., :3], 2, axis=0):
        for quarter in np.array_split(half, 2, axis=1):
            assert (quarter.min(axis=-1) < 0.9).mean() > 0.005


def test_cells_and_models(result: Path) -> None:
    adata = ad.read_h5ad(result / "pbmc3k_scforge.h5ad")
    assert adata.n_obs == 400
    assert "metrics" in adata.uns["scforge"]
    for folder, key in (("light", "X_scforge"), ("transformer", "X_transformer")):
        trained, untrained = adata.obsm[key], adata.obsm[f"{key}_untrained"]
        assert np.isfinite(trained).all()
        assert trained.shape == untrained.shape
        assert np.abs(trained - untrained).max() > 1e-3
        assert bool(adata.uns["scforge"][key]["is_trained"]) is True
        assert bool(adata.uns["scforge"][f"{key}_untrained"]["is_trained"]) is False
        model = Encoder.load(result / folder, adata)
        assert model.is_trained_
        np.testing.assert_allclose(model.get_latent_representation(key_added=None), trained, atol=1e-5)


def test_the_report(result: Path) -> None:
    content = json.loads((result / "report.json").read_text())
    kinds: dict[str, list[dict]] = {}
    for row in content["rows"]:
        kinds.setdefault(row["kind"], []).append(row)
    assert [row["name"] for row in kinds["model"]] == ["X_scforge", "X_transformer"]
    assert [row["name"] for row in kinds["untrained"]] == ["X_scforge_untrained", "X_transformer_untrained"]
    assert all(0 <= score <= 1 for row in content["rows"] for score in row["scores"].values())
    assert max(row["scores"]["knn_macro_f1"] for row in kinds["baseline"]) > 0.7
