from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError
from scforge.estimators import Encoder

WIDTH, DEPTH, HEADS, BINS = 16, 2, 2, 7
PANEL = "OS_scRNA_gene_index.19264.tsv"


class AutoDiscretizationEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.mlp2 = nn.Linear(1, BINS), nn.Linear(BINS, BINS)
        self.emb = nn.Embedding(BINS, WIDTH)
        self.emb_mask, self.emb_pad = nn.Embedding(1, WIDTH), nn.Embedding(1, WIDTH)

    def forward(self, values: torch.Tensor, alpha: float) -> torch.Tensor:
        x = nn.functional.leaky_relu(self.mlp(values[..., None]), 0.1)
        return torch.softmax(alpha * x + self.mlp2(x), dim=-1) @ self.emb.weight


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True) for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)


class MaeAutobin(nn.Module):
    def __init__(self, n_genes: int) -> None:
        super().__init__()
        self.token_emb = AutoDiscretizationEmbedding()
        self.pos_emb = nn.Embedding(n_genes + 3, WIDTH)
        self.encoder = Encoding()
        self.decoder_embed, self.norm, self.to_final = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def states(self, places: torch.Tensor, values: torch.Tensor, alpha: float) -> torch.Tensor:
        state = self.token_emb(values, alpha) + self.pos_emb(places)
        for layer in self.encoder.transformer_encoder:
            state = layer(state)
        return self.encoder.norm(state)


@pytest.fixture
def write(tmp_path: Path, shake) -> Callable[..., MaeAutobin]:
    def write(genes: list[str], *, alpha: float = 1.0, change: Callable[[dict], Any] = dict) -> MaeAutobin:
        theirs = shake(MaeAutobin(len(genes)))
        encoder = {"module_type": "transformer", "hidden_dim": WIDTH, "depth": DEPTH, "heads": HEADS}
        options = {"encoder": encoder, "bin_num": BINS, "bin_alpha": alpha}
        config = {"model": "mae_autobin", "model_config": {"mae_autobin": options}}
        config["dataset_config"] = {"rnaseq": {"seq_len": len(genes) + 2}}
        weights = {f"model.{name}": weight for name, weight in theirs.state_dict().items()}
        torch.save({"cell": change({"config": config, "state_dict": weights})}, tmp_path / "models.ckpt")
        table = pd.DataFrame({"gene_name": genes, "index": range(len(genes))})
        table.sample(frac=1, random_state=0).to_csv(tmp_path / PANEL, sep="\t", index=False)
        return theirs

    return write


@pytest.fixture
def genes() -> list[str]:
    return [f"gene{i}" for i in np.random.default_rng(0).permutation(85)]


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_published_forward(alpha: float, write, pbmc: ad.AnnData, tmp_path: Path) -> None:
    genes = pbmc.var_names[np.random.default_rng(0).permutation(pbmc.n_vars)[:3000]].tolist()
    theirs = write(genes, alpha=alpha)
    model = Encoder.from_checkpoint(tmp_path, family="scfoundation")
    cells = pbmc[:12, np.isin(pbmc.var_names, genes)].copy()
    embedding = model.get_latent_representation(cells)
    assert embedding.shape == (12, 4 * WIDTH)
    where = {gene: place for place, gene in enumerate(genes)}
    counts = pd.DataFrame(cells.X.toarray(), columns=cells.var_names)
    for cell in range(12):
        expressed = counts.iloc[cell][counts.iloc[cell] > 0]
        total = expressed.sum()
        values = [*np.log1p(expressed / total * 1e4), 4.0, np.log10(total)]
        places = [*(where[gene] for gene in expressed.index), len(genes), len(genes) + 1]
        with torch.no_grad():
            state = theirs.states(torch.tensor([places]), torch.tensor([values], dtype=torch.float32), alpha)[0]
        expected = torch.cat([state[-1], state[-2], state[:-2].amax(dim=0), state[:-2].mean(dim=0)]).numpy()
        np.testing.assert_allclose(embedding[cell], expected, atol=1e-5, rtol=0)


def test_an_ordinary_model(write, genes, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    write(genes)
    Encoder.setup_anndata(tiny_adata, labels_key="group")
    model = Encoder.from_checkpoint(tmp_path / "models.ckpt", adata=tiny_adata, pooling="mean")
    before = model.get_latent_representation()
    assert before.shape == (60, WIDTH)
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_array_equal(again.get_latent_representation(), before)


def without(name: str) -> Callable[[dict], dict]:
    return lambda model: {key: value for key, value in model.items() if key != name}


def encoder(**options: Any) -> Callable[[dict], dict]:
    def change(model: dict) -> dict:
        mae = model["config"]["model_config"]["mae_autobin"]
        mae = mae | {"encoder": mae["encoder"] | options}
        return model | {"config": model["config"] | {"model_config": {"mae_autobin": mae}}}

    return change


def other(**config: Any) -> Callable[[dict], dict]:
    return lambda model: model | {"config": model["config"] | config}


def rnaseq(**options: Any) -> Callable[[dict], dict]:
    return other(dataset_config={"rnaseq": {"seq_len": 87, **options}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("config"), "does not contain the model 'cell' and its config"),
        (without("state_dict"), "contains entries that are not tensors .'config'."),
        (other(model="performer"), "model: Input should be 'mae_autobin', got 'performer'"),
        (rnaseq(seq_len="x"), "seq_len: Input should be a valid integer"),
        (encoder(module_type="performer"), "encoder.module_type: Input should be 'transformer'"),
        (other(model_config={}), "mae_autobin: Field required"),
    ],
)
def test_files_that_cannot_be_used(change, message, write, genes, tmp_path: Path) -> None:
    write(genes, change=change)
    with pytest.raises(ModelFileError, match=message):
        Encoder.from_checkpoint(tmp_path, family="scfoundation")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"part": "tissue"}, OptionError, "part='tissue' is not known .known: 'cell', 'gene', 'rde'"),
        ({"part": "rde"}, ModelFileError, "contains no|does not contain the model 'rde' and its config"),
        ({"vocab": ["A", "B"]}, ModelFileError, "has 85 genes, but vocab has 2; pass the genes of this"),
        ({"vocab": "nowhere.tsv"}, MissingFileError, "vocab='nowhere.tsv' does not exist"),
        ({}, DataError, "the indices of vocab must be consecutive integers from 0"),
    ],
)
def test_arguments_that_cannot_be_used(options, error, message, write, genes, tmp_path: Path) -> None:
    write(genes)
    if not options:
        (tmp_path / PANEL).write_text("gene_name\tindex\nA\t0\nB\t2\n")
    with pytest.raises(error, match=message):
        Encoder.from_checkpoint(tmp_path, family="scfoundation", **options)
