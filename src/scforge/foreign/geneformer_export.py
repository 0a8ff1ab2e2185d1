"""Models as Geneformer publishes its own: a folder that ``BertForMaskedLM`` of transformers loads, and dictionaries."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from scforge._io import atomic_folder
from scforge._version import __version__
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.foreign.geneformer import geneformer_names
from scforge.models.transformer_encoder import TransformerEncoder

__all__ = ["to_geneformer"]


class _Spec(Protocol):
    architecture: str
    model_options: dict[str, Any]
    tuning: Any


class _Model(Protocol):
    """What is read of a model."""

    @property
    def backbone(self) -> nn.Module: ...
    @property
    def spec(self) -> _Spec: ...
    @property
    def vocab(self) -> GeneVocab: ...


_NEEDED = {
    "position_embedding": "learned",
    "norm_first": False,
    "use_expression_values": False,
    "gene_vectors": None,
    "gene_head": True,
    "expression_head": None,
    "embedding_norm": "sum",
    "final_norm": None,
}
"""Options that BERT has with this value alone."""


def to_geneformer(model: _Model, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a model as a folder that ``transformers.BertForMaskedLM.from_pretrained`` loads.

    Beside ``config.json`` and ``model.safetensors`` stand the dictionaries that Geneformer's own code reads:
    ``token_dictionary.pkl``, ``gene_median_dictionary.pkl`` where the vocabulary has medians, and
    ``ensembl_mapping_dict.pkl`` where it has aliases. They hold text and numbers alone.

    Parameters
    ----------
    model
        A ``transformer_encoder`` with the options of a BERT; of a fine-tuned model the encoder without its head.
    folder
        Folder to make.
    overwrite
        Replace the model in a folder that exists; files that are not of scforge stay.

    Raises
    ------
    OptionError
        If the model has something that BERT has not, or `folder` exists.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :200].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> options = {"position_embedding": "learned", "norm_first": False, "use_expression_values": False}
    >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> model = scforge.models.Encoder(adata, "transformer_encoder", **options, **sizes)
    >>> to_geneformer(model, "as_geneformer")
    >>> sorted(os.listdir("as_geneformer"))
    ['config.json', 'gene_median_dictionary.pkl', 'model.safetensors', 'token_dictionary.pkl']
    """
    from safetensors.torch import save_file

    options = _options(model)
    tied = options["tie_head"]
    names = geneformer_names(tied=tied)
    theirs = names.invert(model.backbone.state_dict())
    if not tied:
        # BERT keeps a second one, which it does not use.
        theirs["cls.predictions.bias"] = theirs["cls.predictions.decoder.bias"].clone()
    with atomic_folder(folder, overwrite=overwrite) as place:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in theirs.items()}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(_config(model, options), indent=2) + "\n", encoding="utf-8")
        for name, content in _dictionaries(model.vocab).items():
            (place / name).write_bytes(pickle.dumps(content, protocol=4))


def _options(model: _Model) -> dict[str, Any]:
    """Return all options of the architecture, or raise if BERT cannot have them."""
    spec = model.spec
    if spec.architecture != "transformer_encoder":
        raise OptionError(
            f"architecture={spec.architecture!r} has no counterpart in transformers; export a 'transformer_encoder'."
        )
    if spec.tuning is not None and spec.tuning.lora is not None:
        raise OptionError(
            "the model has low-rank adapters, which BertForMaskedLM does not know; export the model that it was "
            "fine-tuned from, or fine-tune with lora=False."
        )
    defaults = {name: p.default for name, p in inspect.signature(TransformerEncoder).parameters.items()}
    options = defaults | spec.model_options
    for name, value in _NEEDED.items():
        if options[name] != value:
            raise OptionError(
                f"{name}={options[name]!r} is an option that BERT does not have; only a model made with "
                f"{name}={value!r} can be exported."
            )
    if options["head_activation"] != options["activation"]:
        raise OptionError(
            f"head_activation={options['head_activation']!r} but activation={options['activation']!r}, and BERT has "
            "one for both; only a model made with the same can be exported."
        )
    return options


def _config(model: _Model, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the BERT."""
    width = options["hidden_dim"]
    return {
        "scforge_version": __version__,  # this folder may be written again
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": len(model.vocab),
        "hidden_size": width,
        "num_hidden_layers": options["num_layers"],
        "num_attention_heads": options["num_heads"],
        "intermediate_size": 4 * width if options["ffn_dim"] is None else options["ffn_dim"],
        "hidden_act": options["activation"],
        "hidden_dropout_prob": options["dropout"],
        # Attention weights are not dropped out here.
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": options["max_seq_len"],
        "type_vocab_size": 2,
        "layer_norm_eps": options["layer_norm_eps"],
        "pad_token_id": model.vocab.pad_id,
        "tie_word_embeddings": options["tie_head"],
        "initializer_range": 0.02,
    }


def _dictionaries(vocab: GeneVocab) -> dict[str, dict[str, Any]]:
    """Return the dictionaries of a vocabulary by the names of their files."""
    files: dict[str, dict[str, Any]] = {
        "token_dictionary.pkl": {token: number for number, token in enumerate(vocab.tokens)}
    }
    if vocab.medians is not None:
        files["gene_median_dictionary.pkl"] = dict(zip(vocab.genes, vocab.medians.tolist(), strict=True))
    if vocab.aliases is not None:
        own = {gene: gene for gene in vocab.genes}
        files["ensembl_mapping_dict.pkl"] = dict(vocab.aliases) | own
    return files
