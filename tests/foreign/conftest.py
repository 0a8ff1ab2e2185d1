import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from torch import nn

TINY_BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def _shake(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            is_norm = weight.ndim == 1 and name.endswith("weight")
            std = 0.1 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + (1.0 if is_norm else 0.0))
    return module.eval()


@pytest.fixture
def shake() -> Callable[..., nn.Module]:
    return _shake


@pytest.fixture
def ensembl_adata(tiny_adata: ad.AnnData) -> ad.AnnData:
    tiny_adata.var_names = tiny_adata.var["ensembl"].tolist()
    return tiny_adata


@pytest.fixture
def dictionaries() -> Callable[[str], tuple[dict[str, int], dict[str, float]]]:
    """Return a function that makes the dictionaries of a Geneformer of the genes of `ensembl_adata` and some more."""

    def dictionaries(version: str) -> tuple[dict[str, int], dict[str, float]]:
        genes = [f"ENSG{i:011d}" for i in range(90)]
        special = ["<pad>", "<mask>"] if version == "V1" else ["<pad>", "<mask>", "<cls>", "<eos>"]
        medians = np.random.default_rng(1).uniform(0.5, 20.0, len(genes))
        return (
            {name: number for number, name in enumerate([*special, *genes])},
            dict(zip(genes, medians.tolist(), strict=True)),
        )

    return dictionaries


@pytest.fixture
def write_bert(tmp_path: Path) -> Callable[..., Any]:
    from transformers import BertConfig, BertForMaskedLM

    def write_bert(
        dictionaries: tuple[dict, dict] | None = None,
        *,
        folder: str = "bert",
        file: str = "safetensors",
        **options: Any,
    ) -> Any:
        place = tmp_path / folder
        config = BertConfig(**(TINY_BERT | {"hidden_act": "relu", "max_position_embeddings": 64} | options))
        model = _shake(BertForMaskedLM(config))
        model.save_pretrained(place)
        if file == "bin":
            (place / "model.safetensors").unlink()
            torch.save(model.state_dict(), place / "pytorch_model.bin")
        if dictionaries is not None:
            # As NumPy scalars, which is how the published ones are.
            tokens, medians = dictionaries
            small = {name: np.int16(number) for name, number in tokens.items()}
            large = {name: np.float64(number) for name, number in medians.items()}
            (place / "token_dictionary.pkl").write_bytes(pickle.dumps(small))
            (place / "gene_median_dictionary.pkl").write_bytes(pickle.dumps(large))
        return model

    return write_bert
