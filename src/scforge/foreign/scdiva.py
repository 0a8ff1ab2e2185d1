"""ScDiVa (arXiv:2602.03477): the layout of its released code, in which a cell is one vector.

There the whole profile becomes a sequence of length 1, so that rotary positions turn nothing (position 0) and the
attention is a linear map. Its own loader falls back to random weights where it cannot read a file; here that is an
error. Of its weights few names were published for certain, so usual spellings of the others are known, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scforge.data.vocab import GeneVocab
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line, listing
from scforge.foreign.base import (
    Foreign,
    LeftOut,
    NameMap,
    Rule,
    Stacked,
    Transposed,
    first_file,
    read_json,
    read_weights,
    register_family,
)

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt", "model.bin", "model.pt")
_ATTENTION = ("attn", "attention", "self_attn")
_FFN = ("ffn", "mlp", "feed_forward")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the gate, of what it is multiplied with, and of the way back; the second as in LLaMA."""
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

_SIZES = {
    "hidden_dim": ("hidden_size", "hidden_dim", "d_model"),
    "num_layers": ("num_hidden_layers", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "num_heads", "n_heads"),
    "ffn_dim": ("intermediate_size", "ffn_dim", "d_ff"),
    "latent_dim": ("latent_dim", "latent_size"),
}
_GENES = ("num_genes", "n_genes", "vocab_size")
_TYPES = ("num_cell_types", "n_cell_types", "num_labels")
_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_eps")
_DROPOUT = ("hidden_dropout_prob", "dropout")
_EPS_OF_CODE = 1e-5


def scdiva_names() -> NameMap:
    """Return the name map of the released layout, in all spellings."""
    projection = "gene_embedding.gene_projection"
    layer, ours = "encoder.layers.{i}.", "encoder.layers.{i}."
    rules = [Rule(f"{projection}.weight", "gene_embedding.weight", Transposed())]
    rules += [Rule(f"{projection}.bias", "gene_embedding.bias")]
    rules += [Rule(f"gene_embedding.{name}.{{p}}", "gene_embedding.norm.{p}") for name in _EMBEDDING_NORMS]
    for part in _ATTENTION:
        qkv = tuple(f"{layer}{part}.{which}_proj.{{p}}" for which in "qkv")
        rules += [Rule(qkv, f"{ours}attention.qkv.{{p}}", Stacked(3))]
        rules += [Rule(f"{layer}{part}.o_proj.{{p}}", f"{ours}attention.out.{{p}}")]
    for part in _FFN:
        for gate, inner, back in _GATED:
            both = tuple(f"{layer}{part}.{which}.{{p}}" for which in (gate, inner))
            rules += [Rule(both, f"{ours}ffn_in.{{p}}", Stacked(2))]
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
    """A folder with ``config.json`` and weights in the layout of ScDiVa's released code."""

    def recognizes(self, source: Path) -> bool:
        """Return whether a configuration that names ScDiVa lies beside weights."""
        folder = source if source.is_dir() else source.parent
        if not (folder / _CONFIG).is_file() or not (source.is_file() or any((folder / w).is_file() for w in _WEIGHTS)):
            return False
        content = read_json(folder / _CONFIG)
        said = [content.get("model_type"), content.get("architectures")] if isinstance(content, dict) else []
        return "scdiva" in str(said).lower()

    def read(
        self, source: Path, *, vocab: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = None
    ) -> Foreign:
        """Read a checkpoint.

        Parameters
        ----------
        source
            Folder with ``config.json`` and weights, or the file of the weights beside it.
        vocab
            The genes in the order of the columns of the checkpoint: their names, names to columns, or a file: JSON of
            either, or text with one name a line. Neither weights nor configuration hold them.

        Raises
        ------
        MissingFileError, ModelFileError, OptionError, DataError
            If something of it is missing, or cannot be used.
        """
        path = first_file(source, _WEIGHTS, "weights") if source.is_dir() else source
        config = read_json(path.parent / _CONFIG)
        if not isinstance(config, dict):
            raise ModelFileError(f"{str(path.parent / _CONFIG)!r} holds no options by name; give the published one.")
        tensors = _without_prefix(read_weights(path))
        _refuse_other_layouts(tensors, str(path))
        genes = _genes(vocab)
        if (n_genes := _number(config, _GENES, int)) is not None and n_genes != len(genes):
            raise ModelFileError(
                f"{_CONFIG} says {n_genes} genes but vocab has {len(genes)}; give the genes of the checkpoint in order."
            )
        sizes = {name: _number(config, spellings, int) for name, spellings in _SIZES.items()}
        if missing := [_SIZES[name][0] for name, size in sizes.items() if size is None]:
            raise ModelFileError(f"{_CONFIG} lacks {listing(missing)}; give the one that belongs to the checkpoint.")
        made = GeneVocab(genes=genes, release="ScDiVa")
        dropout, eps = _number(config, _DROPOUT, float), _number(config, _EPS, float)
        architecture = {
            "name": "scdiva",
            **sizes,
            "mode": "vector",
            "norm_style": "pre",
            "norm": "rms",
            "activation": "swiglu",
            "bias": False,
            "final_norm": any(name.startswith(tuple(f"{norm}." for norm in _FINAL_NORMS)) for name in tensors),
            "dropout": 0.1 if dropout is None else dropout,
            "layer_norm_eps": _EPS_OF_CODE if eps is None else eps,
            "num_cell_types": _n_types(config, tensors),
            "n_special": made.n_special,
        }
        return Foreign(
            family="scdiva",
            version=None,
            architecture=architecture,
            tokenizer={"name": "continuous_projection", "append_cls": False},
            objective={"name": "variational"},
            vocab=made,
            names=scdiva_names(),
            tensors=tensors,
            source=str(path),
        )


def _without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights by their names within the model, where all of them stand in one part of something larger."""
    for prefix in ("model.", "scdiva."):
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _refuse_other_layouts(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise where the weights are of another kind of layers than the released code has."""
    norms = {name for names in (*_NORMS.values(), _EMBEDDING_NORMS) for name in names}
    shifted = [name for name in tensors if name.endswith(".bias") and name.split(".")[-2] in norms]
    gates = [f".{gate}.weight" for gate, _, _ in _GATED]
    plain = not any(name.endswith(tuple(gates)) for name in tensors)
    if shifted or plain:
        found = f"a norm with a shift, {shifted[0]!r}" if shifted else "feed-forward layers without a gate"
        raise ModelFileError(
            f"{where!r} has {found}, but the released code has RMS norms and gated layers; make an ordinary model with "
            "architecture='scdiva', mode='vector' and load its own weights."
        )


def _n_types(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of cell types; without an annotation head 0, whatever the configuration says by default."""
    heads = tuple(f"{name}." for name in _HEADS["annotation_head"])
    if not any(name.startswith(heads) for name in tensors):
        return 0
    if (n_types := _number(config, _TYPES, int)) is None:
        raise ModelFileError(f"{_CONFIG} lacks {_TYPES[0]!r}, though the checkpoint has an annotation head; add it.")
    return n_types


def _number(config: Mapping[str, Any], spellings: tuple[str, ...], kind: type) -> Any:
    """Return an option under the first of its names that is there, or None."""
    for name in spellings:
        if name in config:
            value = config[name]
            right = type(value) is int if kind is int else isinstance(value, int | float) and type(value) is not bool
            if not right or not (0 < value < 2**31 if kind is int else 0 <= value < 1):
                raise ModelFileError(
                    f"{_CONFIG} has {name}={repr(value)[:60]}, which is no number of its kind; copy it again."
                )
            return value
    return None


def _genes(vocab: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None) -> tuple[str, ...]:
    """Return the genes in the order of the columns."""
    if vocab is None:
        raise OptionError(
            "vocab=None but no file of a ScDiVa checkpoint names its genes; give their names in the order of its "
            "columns, or a file of them."
        )
    content: Any = vocab
    if isinstance(vocab, str | os.PathLike):
        path = Path(vocab)
        if not path.is_file():
            raise MissingFileError(f"vocab={str(path)!r} does not exist; give the file of the genes.")
        content = read_json(path) if path.suffix == ".json" else _lines(path)
    if isinstance(content, Mapping):
        names = sorted(content, key=lambda name: (str(type(content[name])), content[name]))
        if [content[name] for name in names] != list(range(len(names))):
            raise OptionError("vocab does not number its genes from 0 without a gap; give the column of each gene.")
        content = names
    genes = list(content) if isinstance(content, Iterable) else []
    if not genes or not all(isinstance(gene, str) and gene for gene in genes):
        raise OptionError(f"vocab={repr(vocab)[:60]} holds no names of genes; give them in the order of the columns.")
    return tuple(genes)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"vocab={str(path)!r} is no text of one name a line: {first_line(error)}.") from error
