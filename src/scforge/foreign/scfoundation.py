"""scFoundation (Hao et al. 2024): the encoder of its masked autoencoder, with its gene and value embedding.

The decoder is a Performer over all genes in the panel, and is not supported here.

https://doi.org/10.1038/s41592-024-02305-7
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from scforge._checks import check_choice
from scforge._constants import MASK_TOKEN, PAD_TOKEN
from scforge._io import parsed
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, ModelFileError
from scforge.foreign.base import (
    Foreign,
    LeftOut,
    NameMap,
    Rule,
    in_order,
    read_torch,
    register_family,
    rows_in_order,
    state_dict_in,
)
from scforge.tokenizers.continuous_projection import ContinuousProjectionTokenizer

_WEIGHTS, _PANEL = "models.ckpt", "OS_scRNA_gene_index.19264.tsv"
_LAYER, _OURS = "encoder.transformer_encoder.{i}.", "encoder.layers.{i}."


def scfoundation_names(order: tuple[int, ...]) -> NameMap:
    """Return the name map of the autoencoder; `order` contains the checkpoint position of each scforge token."""
    rules = (
        Rule("pos_emb.weight", "embedding.gene_embedding.weight", rows_in_order(order)),
        Rule("token_emb.mlp.{p}", "embedding.value_encoder.linear_in.{p}"),
        Rule("token_emb.mlp2.{p}", "embedding.value_encoder.linear_out.{p}"),
        Rule("token_emb.emb.weight", "embedding.value_encoder.bins.weight"),
        Rule(f"{_LAYER}self_attn.in_proj_{{p}}", f"{_OURS}attention.qkv.{{p}}"),
        Rule(f"{_LAYER}self_attn.out_proj.{{p}}", f"{_OURS}attention.out.{{p}}"),
        Rule(f"{_LAYER}linear1.{{p}}", f"{_OURS}ffn_in.{{p}}"),
        Rule(f"{_LAYER}linear2.{{p}}", f"{_OURS}ffn_out.{{p}}"),
        Rule(f"{_LAYER}norm1.{{p}}", f"{_OURS}norm_attention.{{p}}"),
        Rule(f"{_LAYER}norm2.{{p}}", f"{_OURS}norm_ffn.{{p}}"),
        Rule("encoder.norm.{p}", "encoder.final_norm.{p}"),
    )
    decoder = "the decoder, a Performer, which is not computed here"
    left_out = (
        LeftOut("token_emb.emb_mask.weight", "the vector of masked values, which the encoder never sees"),
        LeftOut("token_emb.emb_pad.weight", "the vector of padding, to which nothing attends"),
        *(LeftOut(source, decoder) for source in ("decoder.*", "decoder_embed.*", "norm.*", "to_final.*")),
    )
    return NameMap("scFoundation", rules, left_out)


@register_family("scfoundation")
class ScFoundation:
    """The file ``models.ckpt`` or its folder, with the gene panel."""

    def recognizes(self, source: Path) -> bool:
        """Return whether the file has the published name."""
        return source.name == _WEIGHTS if source.is_file() else (source / _WEIGHTS).is_file()

    def read(
        self,
        source: Path,
        *,
        vocab: str | os.PathLike[str] | Sequence[str] | None = None,
        part: str = "cell",
        pooling: str = "depths",
    ) -> Foreign:
        """Read a checkpoint; see :meth:`scforge.models.Encoder.from_checkpoint` for the arguments."""
        check_choice("part", part, ("cell", "gene", "rde"))
        path = source / _WEIGHTS if source.is_dir() else source
        content = read_torch(path)
        model = content.get(part) if isinstance(content, Mapping) else None
        if not isinstance(model, Mapping) or not isinstance(model.get("config"), Mapping):
            raise ModelFileError(
                f"{str(path)!r} does not contain the model {part!r} and its config; pass the published {_WEIGHTS}."
            )
        prefix = f"the config in {str(path)!r} describes a model that scforge does not support"
        settings = parsed(_Config, model["config"], prefix)
        config = parsed(_Options, {**settings.options.mae_autobin, **settings.dataset_config.rnaseq}, prefix)
        genes = _panel(vocab, path.parent / _PANEL)
        n_rows = config.seq_len + 1
        if len(genes) + 3 != n_rows:
            raise ModelFileError(
                f"{str(path)!r} has {n_rows - 3} genes, but vocab has {len(genes)}; pass the genes of this checkpoint."
            )
        gene_vocab = GeneVocab(genes=genes, release="scFoundation", special_tokens=(PAD_TOKEN, MASK_TOKEN))
        tokenizer = ContinuousProjectionTokenizer.scfoundation(gene_vocab)
        # There: the genes, the depth wanted, the depth available, padding. It has no MASK; here MASK has no vector.
        order = (n_rows - 1, -1, len(genes), len(genes) + 1, *range(len(genes)))
        tensors = state_dict_in(model, f"{path}[{part}]")
        prefixed = all(name.startswith("model.") for name in tensors)
        architecture = {
            "name": "transformer_encoder",
            "hidden_dim": config.encoder.hidden_dim,
            "num_layers": config.encoder.depth,
            "num_heads": config.encoder.heads,
            "ffn_dim": 4 * config.encoder.hidden_dim,
            "dropout": 0.1,
            "max_seq_len": config.seq_len,
            "pooling": pooling,
            "activation": "relu",
            "layer_norm_eps": 1e-5,
            "position_embedding": "none",
            "norm_first": False,
            "final_norm": True,
            "gene_head": False,
            "value_encoder": "soft_bins",
            "n_value_bins": config.bin_num,
            "value_bins_alpha": config.bin_alpha,
            "embedding_norm": "none",
            "n_special": tokenizer.vocab.n_special,
        }
        return Foreign(
            family="scfoundation",
            version=part,
            architecture=architecture,
            tokenizer={"name": "continuous_projection", **tokenizer.config()},
            # The decoder that its own objective needs is not here.
            objective={"name": "joint_embedding"},
            vocab=tokenizer.vocab,
            names=scfoundation_names(order),
            tensors={name.removeprefix("model.") if prefixed else name: value for name, value in tensors.items()},
            source=f"{path}[{part}]",
        )


class _Encoder(BaseModel):
    model_config = ConfigDict(strict=True)
    module_type: Literal["transformer"]
    hidden_dim: PositiveInt
    depth: PositiveInt
    heads: PositiveInt


class _Options(BaseModel):
    model_config = ConfigDict(strict=True)
    encoder: _Encoder
    seq_len: PositiveInt
    bin_num: PositiveInt
    bin_alpha: PositiveFloat


class _Named(BaseModel):
    mae_autobin: dict[str, Any]


class _Datasets(BaseModel):
    rnaseq: dict[str, Any]


class _Config(BaseModel):
    """Fields of a checkpoint configuration that are read."""

    model: Literal["mae_autobin"]
    options: _Named = Field(alias="model_config")
    dataset_config: _Datasets


def _panel(vocab: str | os.PathLike[str] | Sequence[str] | None, beside: Path) -> tuple[str, ...]:
    """Return the genes in the panel, in order."""
    import pandas as pd

    if vocab is not None and not isinstance(vocab, str | os.PathLike):
        return tuple(vocab)
    path = beside if vocab is None else Path(vocab)
    if not path.is_file():
        raise MissingFileError(f"does not exist; pass the gene list of scFoundation, {_PANEL}.", vocab=str(path))
    table = pd.read_csv(path, sep="\t", keep_default_na=False)
    if missing := [name for name in ("gene_name", "index") if name not in table]:
        raise DataError(f"lacks the column {missing[0]!r}; pass the gene list of scFoundation.", vocab=str(path))
    return in_order(dict(zip(table["gene_name"].astype(str), table["index"].tolist(), strict=True)))
