import json
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pytest
import torch
from scvi.hub import HubMetadata, HubModel
from scvi.model.base import BaseModelClass

from scforge.errors import DataError, ModelFileError
from scforge.estimators import Encoder
from scforge.estimators.scvi_hub import HubLoader


@pytest.fixture
def folder(model: Encoder, tmp_path: Path) -> Path:
    model.save(tmp_path / "model", save_anndata=True, scvi_format=True)
    return tmp_path / "model"


def pulled(folder: Path) -> Path:
    kept = ("model.pt", "_scvi_required_metadata.json", "adata.h5ad", "README.md")
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    return folder


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("with_cells", [True, False])
def test_a_hub_model(whole: bool, with_cells: bool, model: Encoder, folder: Path, tiny_adata: ad.AnnData) -> None:
    wanted = model.get_latent_representation(key_added=None)
    hub_model = HubModel(str(folder if whole else pulled(folder)))
    hub_model.load_model(adata=tiny_adata.copy() if with_cells else None, accelerator="cpu")
    assert isinstance(hub_model.model, Encoder)
    np.testing.assert_allclose(hub_model.model.get_latent_representation(), wanted, atol=1e-6)
    assert "gene_pooling" in hub_model.model_card.content
    assert hub_model.metadata.model_cls_name == "Encoder"


def test_a_fine_tuned_model(model: Encoder, quick: dict, tmp_path: Path) -> None:
    tuned = model.finetune("annotation", model.adata, labels_key="group", **quick)
    tuned.save(tmp_path / "model", scvi_format=True)
    again = HubLoader("Encoder").load(pulled(tmp_path / "model"), model.adata.copy(), accelerator="cpu")
    np.testing.assert_array_equal(again.predict()["confidence"], tuned.predict()["confidence"])
    assert again._seen.digest == tuned._seen.digest


def test_what_others_read(model: Encoder, folder: Path) -> None:
    registry = BaseModelClass.load_registry(str(folder))
    assert (registry["model_name"], registry["setup_args"]["labels_key"]) == ("Encoder", "group")
    metadata = HubMetadata.from_dir(str(folder), anndata_version="0.12")
    assert metadata.scvi_version == json.loads((folder / "_scvi_required_metadata.json").read_text())["scvi_version"]
    content = torch.load(folder / "model.pt", weights_only=True)  # runs no code
    assert set(content) == {"model_state_dict", "var_names", "attr_dict", "scforge_files"}
    # Our loader never opens it, and writes it where it is asked to.
    (folder / "model.pt").write_bytes(b"not a model")
    again = Encoder.load(folder, model.adata.copy())
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation())
    model.save(folder.parent / "plain")
    assert not (folder.parent / "plain" / "model.pt").exists()


class Harmful:
    def __reduce__(self) -> tuple:
        return Path.mkdir, (Path("executed"),)


@pytest.mark.parametrize("content", [{"model_state_dict": Harmful()}, {"weights": 1}, [1]])
def test_a_file_of_somebody_else(content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    torch.save(content, "model/model.pt")
    with pytest.raises(ModelFileError, match=r"^'model/model\.pt' is not what save\(scvi_format=True\) wrote: .*\.$"):
        HubLoader("Encoder").load("model", accelerator="cpu")
    assert not Path("executed").exists()


def test_cells_that_lie_elsewhere(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "adata.h5ad", "w") as file:
        file["obs"] = h5py.ExternalLink("secret.h5", "/obs")
    with pytest.raises(DataError, match=r"'/obs' of '.*adata\.h5ad' lies in another file"):
        HubLoader("Encoder").load(tmp_path)
