import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from scforge.cli import main
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError
from scforge.estimators import Encoder
from scforge.foreign.base import list_families, read_checkpoint
from scforge.models import ScDiVaModel

WIDTH, DEPTH, HEADS, INNER, LATENT, TYPES = 16, 2, 2, 24, 5, 3


class Released(nn.Module):
    def __init__(self, n_genes: int) -> None:
        super().__init__()

        def linear(n_in: int, n_out: int) -> nn.Linear:
            return nn.Linear(n_in, n_out, bias=False)

        def layer() -> nn.ModuleDict:
            attention = {name: linear(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
            gated = {"gate_proj": linear(WIDTH, INNER), "up_proj": linear(WIDTH, INNER)}
            ffn = nn.ModuleDict({**gated, "down_proj": linear(INNER, WIDTH)})
            norms = {f"norm{i}": nn.RMSNorm(WIDTH, eps=1e-5) for i in (1, 2)}
            return nn.ModuleDict({"attn": nn.ModuleDict(attention), "ffn": ffn, **norms})

        norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gene_embedding = nn.ModuleDict({"gene_projection": nn.Linear(n_genes, WIDTH), "norm": norm})
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(DEPTH))})
        self.mu_projection, self.logvar_projection = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        dense = [nn.Linear(LATENT, WIDTH) for _ in range(2)]
        self.annotation_head = nn.ModuleDict({"dense": dense[0], "classifier": nn.Linear(WIDTH, TYPES)})
        self.batch_integration_head = nn.ModuleDict({"dense": dense[1], "decoder": nn.Linear(WIDTH, n_genes)})

    def states(self, x: torch.Tensor) -> torch.Tensor:
        state = self.gene_embedding["norm"](self.gene_embedding["gene_projection"](x))
        for layer in self.encoder["layers"]:
            # A cell is one token, which sees itself alone.
            attention, ffn = layer["attn"], layer["ffn"]
            state = state + attention["o_proj"](attention["v_proj"](layer["norm1"](state)))
            inner = layer["norm2"](state)
            state = state + ffn["down_proj"](nn.functional.silu(ffn["gate_proj"](inner)) * ffn["up_proj"](inner))
        return state

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.states(x)
        mu, logvar = self.mu_projection(state), self.logvar_projection(state)
        types, genes = self.annotation_head, self.batch_integration_head
        gelu = nn.functional.gelu
        predicted = types["classifier"](gelu(types["dense"](mu))), genes["decoder"](gelu(genes["dense"](mu)))
        return {"mu": mu, "logvar": logvar, "types": predicted[0], "x": predicted[1]}


CONFIG: dict[str, Any] = {
    **{"model_type": "scdiva", "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS},
    **{"intermediate_size": INNER, "latent_dim": LATENT, "num_cell_types": TYPES},
}


@pytest.fixture
def write(tmp_path: Path, shake) -> Callable[..., Released]:
    def write(n_genes: int, *, change: Callable[[dict], Any] = dict, config: dict | None = None, pt=False) -> Released:
        theirs = shake(Released(n_genes))
        weights = change(dict(theirs.state_dict()))
        if pt:
            torch.save(weights, tmp_path / "pytorch_model.bin")
        else:
            save_file(weights, tmp_path / "model.safetensors")
        settings = {**CONFIG, "num_genes": n_genes, **(config or {})}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
        return theirs

    return write


@pytest.fixture
def genes() -> list[str]:
    return [f"gene{i}" for i in np.random.default_rng(0).permutation(85)]


def module_of(folder: Path, genes: Any, **options: Any) -> ScDiVaModel:
    return Encoder.from_checkpoint(folder, vocab=genes, **options).module.eval()


@pytest.mark.parametrize("pt", [False, True])
def test_the_released_forward(write, pbmc: ad.AnnData, tmp_path: Path, pt: bool) -> None:
    genes = pbmc.var_names[np.random.default_rng(0).permutation(pbmc.n_vars)[:2000]].tolist()
    theirs = write(len(genes), pt=pt)
    model = Encoder.from_checkpoint(tmp_path, vocab=genes)
    cells = pbmc[:12, genes].copy()
    counts = cells.X.toarray()
    x = torch.from_numpy(np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4).astype(np.float32))
    with torch.no_grad():
        expected, found = theirs(x), model.module.eval().encode(x)
        others = {"types": model.module.predict(x), "x": model.module.predict(x, "batch_integration")}
    for name, tensor in {"mu": found["mu"], "logvar": found["logvar"], **others}.items():
        difference = float((tensor - expected[name]).abs().max())
        assert difference < 1e-5 * (1 + float(expected[name].abs().max())), name
    embedding = model.get_latent_representation(cells)
    np.testing.assert_allclose(embedding, expected["mu"].numpy(), atol=1e-5)


def test_the_published_size(write, genes, tmp_path: Path) -> None:
    write(len(genes))
    found = read_checkpoint(tmp_path, vocab=genes)
    options = {name: option for name, option in found.architecture.items() if name != "name"}
    sizes = {"hidden_dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": 2048, "latent_dim": 128}
    with torch.device("meta"):
        model = ScDiVaModel(41_818 + 4, **{**options, **sizes, "num_cell_types": 100})
    assert model.num_parameters() == 93_523_134


def renamed(*pairs: tuple[str, str]) -> Callable[[dict], dict]:
    def change(weights: dict) -> dict:
        for old, new in pairs:
            weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
        return weights

    return change


@pytest.mark.parametrize(
    "change",
    [
        renamed((".attn.", ".self_attn."), (".norm1.", ".input_layernorm."), (".norm2.", ".post_attention_layernorm.")),
        renamed((".ffn.gate_proj", ".mlp.w1"), (".ffn.up_proj", ".mlp.w3"), (".ffn.down_proj", ".mlp.w2")),
        renamed(("mu_projection", "variational.mu_projection"), ("logvar_proj", "variational.logvar_proj")),
        renamed(("annotation_head.dense", "annotation_head.0"), ("annotation_head.classifier", "annotation_head.2")),
        renamed(("gene_embedding.norm", "gene_embedding.layer_norm"), ("batch_integration_head", "batch_head")),
        lambda weights: {f"model.{name}": tensor for name, tensor in weights.items()},
        lambda weights: {**weights, "encoder.layers.0.attn.rotary.inv_freq": torch.ones(4)},
    ],
)
def test_other_spellings(write, genes, tmp_path: Path, change) -> None:
    theirs = write(len(genes), change=change)
    x = torch.rand(3, len(genes))
    with torch.no_grad():
        torch.testing.assert_close(module_of(tmp_path, genes).predict(x, "batch_integration"), theirs(x)["x"])


def test_a_final_norm_and_no_annotation_head(write, genes, tmp_path: Path) -> None:
    def change(weights: dict) -> dict:
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith("annotation_head")}
        return {**kept, "encoder.norm.weight": torch.full((WIDTH,), 2.0)}

    theirs = write(len(genes), change=change)
    model, x = module_of(tmp_path, genes), torch.rand(3, len(genes))
    with torch.no_grad():
        state = nn.functional.rms_norm(theirs.states(x), (WIDTH,), eps=1e-5)
        expected = theirs.mu_projection(2.0 * state)
        torch.testing.assert_close(model.encode(x)["mu"], expected)
    assert model.annotation_head is None


def test_the_genes_may_come_in_several_ways(write, genes, tmp_path: Path) -> None:
    write(len(genes))
    (tmp_path / "genes.txt").write_text("\n".join(genes) + "\n")
    (tmp_path / "genes.json").write_text(json.dumps(genes))
    (tmp_path / "columns.json").write_text(json.dumps({gene: i for i, gene in reversed(list(enumerate(genes)))}))
    for vocab in (tuple(genes), tmp_path / "genes.txt", str(tmp_path / "genes.json"), tmp_path / "columns.json"):
        assert list(read_checkpoint(tmp_path, vocab=vocab).vocab.genes) == genes
    assert "scdiva" in list_families()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "bert"}))
    assert read_checkpoint(tmp_path / "model.safetensors", "scdiva", vocab=genes).family == "scdiva"


def test_an_ordinary_model(write, genes, tiny_adata: ad.AnnData, tmp_path: Path, capsys) -> None:
    write(len(genes))
    Encoder.setup_anndata(tiny_adata, labels_key="group")
    before = Encoder.from_checkpoint(tmp_path, vocab=genes, adata=tiny_adata).get_latent_representation()
    assert before.shape == (60, LATENT)
    (tmp_path / "genes.txt").write_text("\n".join(genes))
    argv = ["convert-checkpoint", str(tmp_path), "--family", "scdiva", "-o", str(tmp_path / "model")]
    assert main([*argv, "--vocab", str(tmp_path / "genes.txt")]) == 0
    again = Encoder.load(tmp_path / "model", tiny_adata)
    assert again.vocab.genes == tuple(genes)
    np.testing.assert_array_equal(again.get_latent_representation(), before)
    assert main([*argv[:-1], str(tmp_path / "other")]) == 2
    assert "vocab" in capsys.readouterr().err


def without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: tensor for key, tensor in weights.items() if key != name}


def with_ones(name: str) -> Callable[[dict], dict]:
    return lambda weights: {**weights, name: torch.ones(WIDTH)}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            without("mu_projection.bias"),
            {},
            "lacks the weights 'mu_projection.bias', which would be randomly initialized",
        ),
        (dict, {"num_attention_heads": None}, "num_attention_heads: Field required"),
        (dict, {"latent_dim": "5"}, "latent_dim: Input should be a valid integer, got '5'"),
        (dict, {"num_genes": 84}, "has 84 genes, but vocab has 85"),
        (
            renamed((".gate_proj", ".linear")),
            {},
            "weights that a ScDiVa model with this config does not have|cannot be converted to",
        ),
        (
            with_ones("encoder.layers.0.norm1.bias"),
            {},
            "weights that a ScDiVa model with this config does not have: .*norm",
        ),
        (
            with_ones("encoder.layers.0.input_layernorm.weight"),
            {},
            "a ScDiVa model with this config does not have: .*norm",
        ),
    ],
)
def test_what_does_not_fit_is_refused(write, genes, tmp_path: Path, change, config, message) -> None:
    write(len(genes), change=change, config=config)
    with pytest.raises(ModelFileError, match=message):
        Encoder.from_checkpoint(tmp_path, family="scdiva", vocab=genes)


def test_missing_files_and_genes(write, genes, tmp_path: Path) -> None:
    def refused(error: type, message: str, vocab: Any = genes) -> None:
        with pytest.raises(error, match=message):
            read_checkpoint(tmp_path, "scdiva", vocab=vocab)

    write(len(genes))
    refused(OptionError, "vocab=None, but a ScDiVa", None)
    refused(DataError, "consecutive integers from 0", {"A": 1})
    refused(MissingFileError, r"genes.txt' does not exist", tmp_path / "genes.txt")
    (tmp_path / "model.safetensors").unlink()
    refused(MissingFileError, "contains no weights")
    write(len(genes))
    (tmp_path / "config.json").unlink()
    refused(MissingFileError, r"config.json' does not exist")
