"""Tables of results name their cells on every route, so that they can be aligned with a file."""

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.cli import main
from scforge.data import convert
from scforge.models import Encoder

QUICK = {"max_epochs": 2, "batch_size": 32, "progress_bar": False, "accelerator": "cpu", "num_threads": 0}


@pytest.fixture(scope="module")
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    cells = many_adata[:160].copy()
    cells.obs["many"] = np.where(np.arange(160) % 3 == 0, "p", "q;r")
    return cells


@pytest.fixture(scope="module")
def base(cells: ad.AnnData) -> Encoder:
    Encoder.setup_anndata(cells, labels_key="group")
    model = Encoder(cells, hidden_dim=8, ffn_dim=16, latent_dim=4)
    model.train(**QUICK)
    return model


@pytest.fixture(scope="module")
def places(cells: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The cells as a file and as a shuffled store."""
    folder = tmp_path_factory.mktemp("cells")
    plain = ad.AnnData(cells.X, obs=cells.obs[["group", "depth", "many"]], var=cells.var)
    plain.write_h5ad(folder / "cells.h5ad")
    convert(folder / "cells.h5ad", folder / "store.zarr", progress=False)
    return [str(folder / "cells.h5ad"), str(folder / "store.zarr")]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("annotation", {"labels_key": "group"}),
        ("regression", {"labels_key": "depth"}),
        ("multi_label", {"labels_key": "many"}),
    ],
)
def test_predictions_of_files_and_shuffled_stores_are_aligned_by_name(base, cells, places, task, options) -> None:
    tuned = base.finetune(task, cells, **options, **QUICK)
    expected = tuned.predict(cells.copy())
    assert list(expected.index) == list(cells.obs_names)
    for place in places:
        found = tuned.predict(place)
        assert set(found.index) == set(cells.obs_names)
        pd.testing.assert_frame_equal(found.loc[cells.obs_names], expected, check_names=False, rtol=1e-4, atol=1e-6)


def test_transferred_labels_are_aligned_by_name(base: Encoder, cells: ad.AnnData, places: list[str]) -> None:
    tables = [base.transfer_labels(place) for place in places]
    assert list(tables[0].index) == list(cells.obs_names)
    assert list(tables[1].index) != list(cells.obs_names)
    by_name = (tables[0]["label"] == tables[1]["label"].loc[cells.obs_names]).mean()
    by_place = (tables[0]["label"].to_numpy() == tables[1]["label"].to_numpy()).mean()
    assert by_name == 1, (by_name, by_place)
    assert by_place < 0.8


@pytest.mark.parametrize("route", [0, 1])
def test_the_csv_of_a_prediction_has_names_and_the_split(base, cells, places, tmp_path: Path, route: int) -> None:
    tuned = base.finetune("annotation", cells, labels_key="group", **QUICK)
    tuned.save(tmp_path / "model")
    copied = cells.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = tuned.predict(copied)
        output = str(tmp_path / "labels.csv")
        assert main(["predict", places[route], "-m", str(tmp_path / "model"), "-o", output, "--quiet"]) == 0
    found = pd.read_csv(output, index_col="cell").loc[cells.obs_names]
    assert found["label"].tolist() == expected["label"].astype(str).tolist()
    assert found["scforge_split"].tolist() == copied.obs["scforge_split"].astype(str).tolist()
    assert set(found["scforge_split"]) == {"train", "validation", "test"}
