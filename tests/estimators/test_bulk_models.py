"""Embedding with a folder that is no model, and of cells that the model does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from scforge.errors import GeneMismatchError, MissingFileError
from scforge.estimators import Encoder, embed_to


def test_cells_of_another_species_are_not_offered_a_vocabulary(many_adata, tmp_path):
    human, mouse = many_adata[:40].copy(), many_adata[:20].copy()
    human.var_names = [f"ENSG{number:011d}" for number in range(human.n_vars)]
    mouse.var_names = [f"ENSMUSG{number:011d}" for number in range(mouse.n_vars)]
    Encoder.setup_anndata(human)
    model = Encoder(human, hidden_dim=4, ffn_dim=4)
    model.is_trained_ = True
    with pytest.raises(GeneMismatchError, match=r"so give cells of that species, or a model that was") as caught:
        embed_to(model, mouse, tmp_path / "out.zarr", progress_bar=False)
    assert "gene_vocab=" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("file", r"model='file' \(--model\) is a file; give the folder"),
        ("none", r"model='none' \(--model\) does not exist; give the folder"),
        ("empty", r"model='empty' \(--model\) holds no model; give the folder"),
        ("ckpt", r"model='ckpt' \(--model\) is the folder of a training; did you mean 'ckpt/epoch=01'\?"),
    ],
)
def test_folders_that_are_no_models(model, said, tiny_adata, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("empty").mkdir()
    for part in ("step=00000009", "epoch=01"):
        Path("ckpt", part).mkdir(parents=True)
        Path("ckpt", part, "config.json").touch()
    with pytest.raises(MissingFileError, match=said):
        embed_to(model, tiny_adata, "out.zarr")
