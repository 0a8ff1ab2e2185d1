"""An evaluation finds its data by a name."""

from __future__ import annotations

import anndata as ad
import pytest

from scforge.data import GeneVocab
from scforge.errors import MissingFileError, OptionError
from scforge.eval.evaluation import Evaluation, ScoredCells, resolve, to_evaluation


def found(dataset: str, **datasets: str) -> object:
    (one,) = resolve([Evaluation("label_prediction", dataset=dataset)], datasets)
    return one.dataset


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCFORGE_DATA", raising=False)


def test_an_embedded_data_set_opens_by_its_name(pbmc: ad.AnnData) -> None:
    place = found("pbmc3k")
    scored = ScoredCells.open(place, GeneVocab.from_adata(pbmc), 50)
    assert len(scored.obs) == 50
    assert scored.obs["cell_type"].equals(pbmc.obs["cell_type"].iloc[scored.rows])


def test_a_card_says_how_to_get_what_is_not_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match=r"the data set 'norman' is not here, .*to get norman.h5ad, download"):
        found("norman")
    monkeypatch.setenv("SCFORGE_DATA", str(tmp_path))
    (tmp_path / "norman.h5ad").touch()
    assert found("norman") == str(tmp_path / "norman.h5ad")


def test_a_path_that_is_given_for_a_name_goes_first(tmp_path) -> None:
    (tmp_path / "other.h5ad").touch()
    assert found("pbmc3k", pbmc3k=str(tmp_path / "other.h5ad")) == str(tmp_path / "other.h5ad")


def test_a_name_that_is_nearly_known() -> None:
    with pytest.raises(OptionError, match=r"dataset='pbmc3' of .*; did you mean 'pbmc3k'\? Otherwise put the file at"):
        found("pbmc3")


def test_an_option_of_the_benchmark_is_its_own() -> None:
    """``max_cells`` is an option of evaluations, and of some benchmarks."""
    assert to_evaluation({"scib": {"labels_key": "group", "max_cells": 500}}).options["max_cells"] == 500
    assert to_evaluation({"geometry": {"max_cells": 500}}).max_cells == 500
