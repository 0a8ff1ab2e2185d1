import copy
import json
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.data import open_cells
from scforge.errors import ModelFileError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.estimators import export as exporting
from scforge.models.registry import MODELS
from scforge.testing import raises

KINDS = {
    "light": (None, {}),
    "transformer": ("transformer_encoder", {"num_layers": 2, "num_heads": 2}),
    "vectors": (None, {}),
}
SIZE = {"n_top_genes": 300, "hidden_dim": 16, "ffn_dim": 32}


@pytest.fixture(scope="module")
def cells(pbmc: ad.AnnData) -> ad.AnnData:
    adata = pbmc[:300].copy()
    Encoder.setup_anndata(adata)
    return adata


@pytest.fixture(scope="module")
def models(cells: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    table = tmp_path_factory.mktemp("vectors") / "genes.npz"
    vectors = np.random.default_rng(0).normal(size=(cells.n_vars, 6)).astype(np.float32)
    np.savez(table, genes=cells.var_names.to_numpy(dtype=str), vectors=vectors)
    tokenizers = {"vectors": {"name": "gene_embedding", "table": str(table)}}
    made = {
        name: Encoder(cells, architecture, tokenizers.get(name), **SIZE, **options)
        for name, (architecture, options) in KINDS.items()
    }
    for model in made.values():
        model.is_trained_ = True
        with torch.no_grad():
            for parameter in model.module.parameters():  # numbers of the size that training makes
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return made


def runner(folder: Path) -> Callable[[dict[str, torch.Tensor]], np.ndarray]:
    said = json.loads((folder / "export.json").read_text())
    names, dtypes = ([part[key] for part in said["inputs"]] for key in ("name", "dtype"))

    def tensors(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        assert [str(batch[name].dtype) for name in names] == [f"torch.{dtype}" for dtype in dtypes]
        return [batch[name] for name in names]

    if said["file"].endswith(".pt2"):
        module = torch.export.load(folder / said["file"]).module()
        return lambda batch: module(*tensors(batch)).detach().numpy()
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / said["file"], providers=["CPUExecutionProvider"])
    assert [part.name for part in session.get_inputs()] == names
    return lambda batch: session.run(None, dict(zip(names, map(torch.Tensor.numpy, tensors(batch)), strict=True)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torch", "onnx"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_equal_embeddings_on_pbmc(kind: str, format: str, models, cells: ad.AnnData, tmp_path: Path) -> None:
    model, folder = models[kind], tmp_path / "exported"
    model.export(folder, format)
    source, run = open_cells(cells, model.vocab), runner(folder)
    for rows in ([7], range(3, 14), range(40, 104)):
        batch = dict(model.tokenizer(source.block(np.array(rows))))
        for length in (None, 9):
            some = batch if length is None else {name: tensor[:, :length] for name, tensor in batch.items()}
            with torch.no_grad():
                wanted = model.module.encode(**some).numpy()
            np.testing.assert_allclose(run(some), wanted, atol=1e-5 if format == "torch" else 1e-4)
    said = json.loads((folder / "export.json").read_text())
    assert said["vocab"]["hash"] == model.vocab.hash == json.loads((folder / "vocab.json").read_text())["hash"]
    assert said["tokenizer"]["name"] == model.spec.tokenizer
    assert said["parity"]["max_abs_difference"] < 1e-4


@pytest.mark.slow
def test_adapters_are_merged_and_the_head_is_left_out(models, cells: ad.AnnData, tmp_path: Path) -> None:
    quick = {"max_epochs": 1, "batch_size": 64, "progress_bar": False, "accelerator": "cpu", "lr": 1e-2}
    tuned = models["transformer"].finetune(
        "annotation", cells[:100].copy(), labels_key="cell_type", lora={"r": 2}, **quick
    )
    tuned.export(tmp_path / "tuned", "torch")
    batch = dict(tuned.tokenizer(open_cells(cells, tuned.vocab).block(np.arange(5))))
    with torch.no_grad():
        wanted, before = tuned.module.encode(**batch).numpy(), models["transformer"].module.encode(**batch).numpy()
    found = runner(tmp_path / "tuned")(batch)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(found - before).max() > 1e-3


@pytest.fixture
def integrated(trained, tiny_adata: ad.AnnData) -> Encoder:
    return trained(adata=tiny_adata, setup={"batch_key": "batch"})


@pytest.mark.parametrize("correction", [0.5, 1])
@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_embeddings_that_are_corrected_for_batches(
    format: str, correction: float, integrated: Encoder, tiny_adata: ad.AnnData, tmp_path: Path
) -> None:
    integrated.export(tmp_path / "out", format, correction=correction)
    said, run = json.loads((tmp_path / "out" / "export.json").read_text()), runner(tmp_path / "out")
    assert (said["batches"], said["correction"]) == (["x", "y"], correction)
    assert said["inputs"][-1] == {"name": "batch", "dtype": "int64", "shape": ["cells"]}
    tiny_adata.obs["batch"] = [["x", "y", "new"][i % 3] for i in range(tiny_adata.n_obs)]
    with pytest.warns(ScforgeWarning, match="20 of 60 cells have no batch among those of the training cells"):
        wanted = integrated.get_latent_representation(tiny_adata, key_added=None, correction=correction)
    tokens = dict(integrated.tokenizer(open_cells(tiny_adata, integrated.vocab).block(np.arange(60))))
    codes = torch.tensor([0, 1, -1] * 20)
    np.testing.assert_allclose(run(tokens | {"batch": codes}), wanted, atol=1e-5)
    exchanged = run(tokens | {"batch": torch.tensor([1, 0, -1] * 20)})
    moved = np.abs(exchanged - wanted).max(axis=1) > 1e-3
    assert moved[codes >= 0].all()
    assert not moved[codes < 0].any()


def test_a_correction_that_cannot_be_exported(integrated: Encoder, models, tiny_adata: ad.AnnData, tmp_path: Path):
    for model, options, message in (
        (models["light"], {"correction": 0.5}, "correction=0.5, but the model has no correction: .*batch_key in setup"),
        (integrated, {"correction": 1.5}, "correction=1.5 is not a number from 0 to 1"),
        (integrated, {"correction": 1, "format": "transformers"}, "correction=1 cannot be exported with format='trans"),
    ):
        with pytest.raises(OptionError, match=message):
            model.export(tmp_path / "out", **({"format": "torch"} | options))
    integrated.fitted.landmarks = None
    with pytest.warns(ScforgeWarning, match="the query is not mapped onto the reference"):
        query = Encoder.load_query_data(tiny_adata[:20].copy(), integrated)
    with raises(OptionError, "correction"):
        query.export(tmp_path / "out", "torch", correction=1)
    assert not list(tmp_path.iterdir())


def test_arguments_that_cannot_be(models, tmp_path: Path) -> None:
    for options, message in (
        ({"format": "tensorrt"}, r"format='tensorrt' is unknown; choose 'onnx', 'torch' or 'transformers'\."),
        ({"max_len": 1}, "max_len=1 is too small; pass at least 2"),
        ({"max_len": 10**6}, "max_len=1000000 exceeds the"),
        ({"path": Path(__file__).parent, "format": "torch"}, r"path='.*' exists and is not empty; pass overwrite=True"),
    ):
        with pytest.raises(OptionError, match=message):
            models["transformer"].export(**({"path": tmp_path / "out"} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("weight", [0.5, float("nan")])
def test_an_export_that_computes_something_else(weight: float, models, tmp_path: Path, monkeypatch) -> None:
    whole = exporting._program

    def other(model, encoder, *rest):
        wrong = copy.deepcopy(encoder)
        with torch.no_grad():
            for parameter in wrong.parameters():
                parameter.copy_(weight * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))
        return whole(model, wrong, *rest)

    monkeypatch.setattr(exporting, "_program", other)
    with pytest.raises(ModelFileError):
        models["light"].export(tmp_path / "out", "torch")
    assert not list(tmp_path.iterdir())


def test_an_architecture_that_cannot_be_exported(
    custom_architecture: str, pbmc: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = MODELS.get(custom_architecture)
    plain = cls.encode

    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return plain(self, input_ids[:, : int(input_ids.max())], attention_mask, values)

    monkeypatch.setattr(cls, "encode", encode)
    adata = pbmc[:60].copy()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, custom_architecture, n_top_genes=300, hidden_dim=8, num_layers=1)
    with raises(OptionError, "architecture"):
        model.export(tmp_path / "out", "torch")
    assert not list(tmp_path.iterdir())


def test_without_the_packages(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    util, gone = exporting.importlib.util, ["onnxscript"]
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest))
    with raises(OptionError, "format"):
        models["light"].export(tmp_path / "out")
