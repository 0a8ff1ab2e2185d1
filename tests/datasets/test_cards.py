"""Cards tell of data sets, and a name finds its file or how to get it."""

import dataclasses
from pathlib import Path

import anndata as ad
import pytest

from scforge._io import sha256_of
from scforge.datasets import get_card, list_cards, load
from scforge.datasets.cards import SplitRule
from scforge.datasets.loading import find_file
from scforge.errors import DataError, MissingFileError, OptionError
from scforge.testing import raises

SOURCE = Path(__file__).parents[3] / "shared" / "data" / "cells"
HERE = [name for name in list_cards() if (SOURCE / f"{name}.h5ad").exists() and not get_card(name).embedded]


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCFORGE_DATA", raising=False)


def test_names() -> None:
    named = {"pbmc3k", "tabula_sapiens", "immune_atlas", "norman", "kang_ctrl_8donor", "sc_mixology"}
    assert named <= set(list_cards()), "recipes use them"
    with raises(OptionError, "name"):
        get_card("pbmc3")


@pytest.mark.parametrize("name", list_cards())
def test_a_card_is_whole(name: str) -> None:
    card = get_card(name)
    assert card.name == name
    assert card.organism in ("Homo sapiens", "Mus musculus")
    assert card.columns, "nothing to evaluate against"
    assert (card.control is None) == (card.perturbation_key is None)
    assert card.split is not None
    assert card.split.column in {*card.columns.values()}
    assert not card.how_to_get.endswith(".")
    assert all(get_card(other).shares_cells_with.count(name) == 1 for other in card.shares_cells_with)


@pytest.mark.parametrize("name", [name for name in list_cards() if get_card(name).embedded])
def test_embedded_data_are_those_of_the_card(name: str, tmp_path: Path) -> None:
    card = get_card(name)
    assert sha256_of(find_file(name)) == card.sha256
    adata = load(name, tmp_path)
    assert adata.shape == (card.n_cells, card.n_genes)
    assert set(card.columns.values()) <= set(adata.obs)


@pytest.mark.parametrize("name", [name for name in list_cards() if not get_card(name).embedded])
def test_a_missing_file_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="not found because neither folder nor SCFORGE_DATA is set") as told:
        load(name)
    assert str(told.value).endswith(f"; to get {name}.h5ad, {get_card(name).how_to_get}.")
    with pytest.raises(MissingFileError, match=f"the data set '{name}' was not found in '.*{tmp_path.name}'; to get"):
        load(name, tmp_path)


def test_a_file_is_found_by_the_environment_and_checked(
    tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCFORGE_DATA", str(tmp_path))
    tiny_adata.obs = tiny_adata.obs.rename(columns={"group": "cell_lines"})
    tiny_adata.write_h5ad(tmp_path / "sc_mixology.h5ad")
    with pytest.raises(DataError, match=r"not match the checksum in the card 'sc_mixology' \(SHA-256 .*; pass verify"):
        load("sc_mixology")
    with raises(DataError, "labels_key"):
        load("sc_mixology", verify=False)
    tiny_adata.obs["cell_line"] = tiny_adata.obs["cell_lines"]
    tiny_adata.write_h5ad(tmp_path / "sc_mixology.h5ad")
    assert load("sc_mixology", verify=False).shape == tiny_adata.shape


def test_controls_must_be_there(tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    tiny_adata.obs["perturbation"] = tiny_adata.obs["group"]
    tiny_adata.write_h5ad(tmp_path / "adamson.h5ad")
    with raises(DataError, "control"):
        load("adamson", tmp_path)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.real_data
def test_files_at_hand_are_those_of_the_cards(name: str) -> None:
    card = get_card(name)
    adata = load(name, SOURCE)
    assert adata.shape == (card.n_cells, card.n_genes)
    ensembl = adata.var_names.str.match(r"^ENS(MUS)?G\d{11}$").all()
    assert ensembl == (card.genes == "ensembl")


def test_a_rule_that_says_nothing() -> None:
    rule = SplitRule("groups", "donor", 0.1, 2)
    for change, message in [
        ({"kind": "random"}, "kind='random' is not known .known: 'stratified'"),
        ({"test": 0}, "test=0 must be"),
        ({"validation": 1.5}, "validation=1.5 must be"),
        ({"kind": "stratified", "test": 2}, "test=2 is not valid for a stratified split"),
    ]:
        with pytest.raises(OptionError, match=message):
            dataclasses.replace(rule, **change)
