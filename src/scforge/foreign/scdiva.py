"""ScDiVa (arXiv:2602.03477): the layout of its released code, in which a cell is one vector.

In the released code, the whole profile becomes a sequence of length 1, so rotary positions have no effect (position 0)
and the attention is a linear map. The original loader falls back to random weights if it cannot read a file; here, this
is an error. Only a few weight names were published reliably, so common spellings of the others are also accepted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from scforge._io import parsed, read_json
from scforge.data.vocab import GeneVocab
from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.foreign.base import (
    TRANSPOSED,
    Foreign,
    LeftOut,
    NameMap,
    Rule,
    first_file,
    in_order,
    read_options,
    read_weights,
    register_family,
    stacked,
)

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt", "model.bin", "model.pt")
_ATTENTION = ("attn", "attention", "self_attn")
_FFN = ("ffn", "mlp", "feed_forward")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the gate, the up-projection and the down-projection; the second set is used by LLaMA."""
_NORMS = {
    "norm_attention": ("norm1", "attn_norm", "attention_norm", "input_layernorm", "ln1"),
    "norm_ffn": ("norm2", "ffn_norm", "mlp_norm", "post_attention_layernorm", "ln2"),
}
_EMBEDDING_NORMS = ("norm", "layer_norm", "rms_norm", "LayerNorm")
_FINAL_NORMS = ("encoder.norm", "encoder.final_norm", "encoder.layer_norm")
_LATENT = ("", "variational_layer.", "variational.", "vae.")
_HEADS = {
    "annotation_head": ("annotation_head", "heads.annotation", "classifier_head"),
    "batch_integration_head": ("batch_integration_head", "batch_head", "heads.batch_integration", "decoder_head"),
}
_DENSE = ("dense", "fc1", "0")
_LAST = {"annotation_head": ("classifier", "out_proj", "fc2", "2"), "batch_integration_head": ("decoder", "fc2", "2")}
_LAST_OURS = {"annotation_head": "classifier", "batch_integration_head": "decoder"}

_EPS_OF_CODE = 1e-5


class _Config(BaseModel):
    """Fields of ``config.json`` that are read, with common spellings."""

    model_config = ConfigDict(strict=True)
    hidden_dim: PositiveInt = Field(validation_alias=AliasChoices("hidden_size", "hidden_dim", "d_model"))
    num_layers: PositiveInt = Field(validation_alias=AliasChoices("num_hidden_layers", "num_layers", "n_layers"))
    num_heads: PositiveInt = Field(validation_alias=AliasChoices("num_attention_heads", "num_heads", "n_heads"))
    ffn_dim: PositiveInt = Field(validation_alias=AliasChoices("intermediate_size", "ffn_dim", "d_ff"))
    latent_dim: PositiveInt = Field(validation_alias=AliasChoices("latent_dim", "latent_size"))
    n_genes: PositiveInt | None = Field(None, validation_alias=AliasChoices("num_genes", "n_genes", "vocab_size"))
    n_types: PositiveInt | None = Field(
        None, validation_alias=AliasChoices("num_cell_types", "n_cell_types", "num_labels")
    )
    eps: NonNegativeFloat = Field(
        _EPS_OF_CODE, validation_alias=AliasChoices("rms_norm_eps", "norm_eps", "layer_norm_eps")
    )
    dropout: NonNegativeFloat = Field(0.1, validation_alias=AliasChoices("hidden_dropout_prob", "dropout"))


def scdiva_names() -> NameMap:
    """Return the name map of the released layout, with all spellings."""
    projection = "gene_embedding.gene_projection"
    layer, ours = "encoder.layers.{i}.", "encoder.layers.{i}."
    rules = [Rule(f"{projection}.weight", "gene_embedding.weight", TRANSPOSED)]
    rules += [Rule(f"{projection}.bias", "gene_embedding.bias")]
    rules += [Rule(f"gene_embedding.{name}.{{p}}", "gene_embedding.norm.{p}") for name in _EMBEDDING_NORMS]
    for part in _ATTENTION:
        qkv = tuple(f"{layer}{part}.{which}_proj.{{p}}" for which in "qkv")
        rules += [Rule(qkv, f"{ours}attention.qkv.{{p}}", stacked(3))]
        rules += [Rule(f"{layer}{part}.o_proj.{{p}}", f"{ours}attention.out.{{p}}")]
    for part in _FFN:
        for gate, inner, back in _GATED:
            both = tuple(f"{layer}{part}.{which}.{{p}}" for which in (gate, inner))
            rules += [Rule(both, f"{ours}ffn_in.{{p}}", stacked(2))]
            rules += [Rule(f"{layer}{part}.{back}.{{p}}", f"{ours}ffn_out.{{p}}")]
    for norm, names in _NORMS.items():
        rules += [Rule(f"{layer}{name}.{{p}}", f"{ours}{norm}.{{p}}") for name in names]
    rules += [Rule(f"{name}.{{p}}", "encoder.final_norm.{p}") for name in _FINAL_NORMS]
    for which in ("mu", "logvar"):
        target = f"variational_layer.{which}_projection.{{p}}"
        rules += [Rule(f"{before}{which}_projection.{{p}}", target) for before in _LATENT]
    for head, spellings in _HEADS.items():
        for name in spellings:
            rules += [Rule(f"{name}.{part}.{{p}}", f"{head}.dense.{{p}}") for part in _DENSE]
            rules += [Rule(f"{name}.{part}.{{p}}", f"{head}.{_LAST_OURS[head]}.{{p}}") for part in _LAST[head]]
    turned = "a table of rotary positions, which turn nothing at position 0"
    left_out = tuple(LeftOut(f"*{name}", turned) for name in ("inv_freq", "cos_cached", "sin_cached"))
    return NameMap("ScDiVa", tuple(rules), left_out)


@register_family("scdiva")
class ScDiVa:
    """A folder with ``config.json`` and weights in the layout of the released ScDiVa code."""

    def recognizes(self, source: Path) -> bool:
        """Return whether there is a configuration that mentions ScDiVa next to the weights."""
        folder = source if source.is_dir() else source.parent
        if not (folder / _CONFIG).is_file() or not (source.is_file() or any((folder / w).is_file() for w in _WEIGHTS)):
            return False
        content = read_options(folder / _CONFIG)
        names = [content.get("model_type"), content.get("architectures")]
        return "scdiva" in str(names).lower()

    def read(
        self, source: Path, *, vocab: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = None
    ) -> Foreign:
        """Read a checkpoint.

        Parameters
        ----------
        source
            Folder with ``config.json`` and weights, or the weight file next to ``config.json``.
        vocab
            Genes in the order of the checkpoint columns: a list of names, a mapping from name to column, or a file
            (JSON with either, or text with one name per line). Neither the weights nor the configuration contain the
            gene names.

        Raises
        ------
        MissingFileError, ModelFileError, OptionError, DataError
            If a part of the checkpoint is missing or cannot be used.
        """
        path = first_file(source, _WEIGHTS, "weights") if source.is_dir() else source
        config = parsed(_Config, read_json(path.parent / _CONFIG), f"{_CONFIG} is not a ScDiVa configuration")
        tensors = _without_prefix(read_weights(path))
        genes = _genes(vocab)
        if config.n_genes is not None and config.n_genes != len(genes):
            raise ModelFileError(
                f"{_CONFIG} has {config.n_genes} genes, but vocab has {len(genes)}; pass the vocab of this checkpoint."
            )
        # Without an annotation head there are none, whatever the configuration says by default.
        has_types = any(name.startswith(tuple(f"{head}." for head in _HEADS["annotation_head"])) for name in tensors)
        if has_types and config.n_types is None:
            raise ModelFileError(f"{_CONFIG} lacks 'num_cell_types', although there is an annotation head; add it.")
        gene_vocab = GeneVocab(genes=genes, release="ScDiVa")
        architecture = {
            "name": "scdiva",
            **config.model_dump(include={"hidden_dim", "num_layers", "num_heads", "ffn_dim", "latent_dim", "dropout"}),
            "mode": "vector",
            "norm_style": "pre",
            "norm": "rms",
            "activation": "swiglu",
            "bias": False,
            "final_norm": any(name.startswith(tuple(f"{norm}." for norm in _FINAL_NORMS)) for name in tensors),
            "layer_norm_eps": config.eps,
            "num_cell_types": config.n_types if has_types else 0,
            "n_special": gene_vocab.n_special,
        }
        return Foreign(
            family="scdiva",
            version=None,
            architecture=architecture,
            tokenizer={"name": "continuous_projection", "append_cls": False},
            objective={"name": "variational"},
            vocab=gene_vocab,
            names=scdiva_names(),
            tensors=tensors,
            source=str(path),
        )


def _without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under their names in the model, even if all are in one part of a larger module."""
    for prefix in ("model.", "scdiva."):
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _genes(vocab: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None) -> tuple[str, ...]:
    """Return the genes in the order of the columns."""
    if vocab is None:
        raise OptionError(
            ", but a ScDiVa checkpoint has no gene names; pass the gene names in the order of its columns.", vocab=None
        )
    content: Any = vocab
    if isinstance(vocab, str | os.PathLike):
        path = Path(vocab)
        if not path.is_file():
            raise MissingFileError("does not exist; pass the file with the gene names.", vocab=str(path))
        is_json = path.suffix == ".json"
        content = read_json(path) if is_json else path.read_text(encoding="utf-8").removesuffix("\n").splitlines()
    return in_order(content) if isinstance(content, Mapping) else tuple(content)
