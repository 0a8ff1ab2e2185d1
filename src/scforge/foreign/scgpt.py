"""scGPT (Cui et al. 2024): the state of its ``TransformerModel``, with or without flash attention.

https://doi.org/10.1038/s41592-024-02201-0
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scforge._checks import check_bool
from scforge._constants import CLS_TOKEN, MASK_TOKEN, PAD_TOKEN
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, listing
from scforge.foreign.base import (
    Foreign,
    LeftOut,
    NameMap,
    RowsInOrder,
    Rule,
    first_file,
    read_json,
    read_weights,
    register_family,
)

_LARGEST = 1e30  # in single precision, too
_WEIGHTS = ("best_model.pt", "model.pt", "model.safetensors")
_VOCAB, _ARGS = "vocab.json", "args.json"
_LAYER, _OURS = "transformer_encoder.layers.{i}.", "encoder.layers.{i}."


def scgpt_names(order: tuple[int, ...]) -> NameMap:
    """Return the name map of a ``TransformerModel``; `order` has the token id there of each of our tokens."""
    rules = (
        Rule("encoder.embedding.weight", "embedding.gene_embedding.weight", RowsInOrder(order)),
        Rule("encoder.enc_norm.{p}", "embedding.layer_norm.{p}"),
        Rule("value_encoder.linear1.{p}", "embedding.value_encoder.linear_in.{p}"),
        Rule("value_encoder.linear2.{p}", "embedding.value_encoder.linear_out.{p}"),
        Rule("value_encoder.norm.{p}", "embedding.value_encoder.layer_norm.{p}"),
        Rule(f"{_LAYER}self_attn.in_proj_{{p}}", f"{_OURS}attention.qkv.{{p}}"),
        Rule(f"{_LAYER}self_attn.Wqkv.{{p}}", f"{_OURS}attention.qkv.{{p}}"),
        Rule(f"{_LAYER}self_attn.out_proj.{{p}}", f"{_OURS}attention.out.{{p}}"),
        Rule(f"{_LAYER}linear1.{{p}}", f"{_OURS}ffn_in.{{p}}"),
        Rule(f"{_LAYER}linear2.{{p}}", f"{_OURS}ffn_out.{{p}}"),
        Rule(f"{_LAYER}norm1.{{p}}", f"{_OURS}norm_attention.{{p}}"),
        Rule(f"{_LAYER}norm2.{{p}}", f"{_OURS}norm_ffn.{{p}}"),
        Rule("decoder.fc.0.{p}", "expression_head.dense.{p}"),
        Rule("decoder.fc.2.{p}", "expression_head.middle.{p}"),
        Rule("decoder.fc.4.{p}", "expression_head.decoder.{p}"),
    )
    left_out = (
        LeftOut("decoder.zero_logit.*", "probabilities of zeros, which no objective here predicts"),
        LeftOut("cls_decoder.*", "classes of a fine-tuning; finetune('annotation') makes a head of its own"),
        LeftOut("mvc_decoder.*", "expression from the cell embedding, which no objective here predicts"),
        LeftOut("flag_encoder.*", "marks of given genes in its generative training; embedding cells takes none"),
        LeftOut("grad_reverse_discriminator.*", "the adversary of a fine-tuning, no part of the model"),
    )
    return NameMap("scGPT", rules, left_out)


def scgpt_vocab(tokens: Mapping[str, int], *, pad_token: str = PAD_TOKEN) -> tuple[GeneVocab, tuple[int, ...]]:
    """Return our vocabulary of a published one, and the token id there of each of our tokens (-1 for none).

    Special tokens come first here. scGPT hides values rather than genes, so it has no MASK; here MASK has no vector.

    Parameters
    ----------
    tokens
        Gene symbol or special token to token id.
    pad_token
        The token of padding.

    Raises
    ------
    DataError
        If `tokens` is no vocabulary of scGPT.
    """
    for name, number in tokens.items():
        if not isinstance(name, str) or not isinstance(number, numbers.Integral) or isinstance(number, bool):
            raise DataError(f"vocab gives {name!r} the token {number!r}; give the published vocab.json.")
    names = sorted(tokens, key=lambda name: tokens[name])
    if [tokens[name] for name in names] != list(range(len(names))):
        raise DataError("vocab does not number its tokens from 0 without a gap; give the published vocab.json.")
    if pad_token != PAD_TOKEN:
        raise DataError(f"pad_token={pad_token!r} but scforge has {PAD_TOKEN!r} alone; rename it in vocab and args.")
    if missing := [name for name in (PAD_TOKEN, CLS_TOKEN) if name not in tokens]:
        raise DataError(f"vocab lacks the special tokens {listing(missing)}; give the published vocab.json.")
    special = [name for name in names if name.startswith("<") and name.endswith(">")]
    ours = list(dict.fromkeys([PAD_TOKEN, MASK_TOKEN, CLS_TOKEN, *special]))
    genes = [name for name in names if name not in set(ours)]
    vocab = GeneVocab(genes=tuple(genes), release="scGPT", special_tokens=tuple(ours))
    return vocab, tuple(int(tokens.get(name, -1)) for name in vocab.tokens)


@register_family("scgpt")
class ScGPT:
    """Folders of a published scGPT: ``best_model.pt``, ``vocab.json``, ``args.json``."""

    def recognizes(self, source: Path) -> bool:
        """Return whether the vocabulary and the arguments of a training are there."""
        folder = source if source.is_dir() else source.parent
        return (folder / _VOCAB).is_file() and (folder / _ARGS).is_file()

    def read(
        self,
        source: Path,
        *,
        vocab: str | os.PathLike[str] | Mapping[str, int] | None = None,
        args: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        cls_value: float | None = None,
        normalize: bool = False,
    ) -> Foreign:
        """Read a checkpoint; see :meth:`scforge.models.Encoder.from_checkpoint` for the arguments."""
        folder = source if source.is_dir() else source.parent
        weights = first_file(source, _WEIGHTS, "weights") if source.is_dir() else source
        options = _args(_content("args", args, folder / _ARGS))
        genes, order = scgpt_vocab(_content("vocab", vocab, folder / _VOCAB), pad_token=options["pad_token"])
        special_value = options["pad_value"] if cls_value is None else cls_value
        if not _is_number(special_value):
            raise OptionError(
                f"cls_value={_shown(cls_value)} is no finite number; leave it out for pad_value of args, or give 0."
            )
        architecture = {
            "name": "transformer_encoder",
            "hidden_dim": options["embsize"],
            "num_layers": options["nlayers"],
            "num_heads": options["nheads"],
            "ffn_dim": options["d_hid"],
            "dropout": options["dropout"],
            "max_seq_len": options["max_seq_len"],
            "pooling": "cls",
            "activation": "relu",
            "layer_norm_eps": 1e-5,
            "position_embedding": "none",
            "norm_first": False,
            "gene_head": False,
            "expression_head": "deep",
            "value_encoder": "mlp",
            "embedding_norm": "genes",
            "n_special": genes.n_special,
            "special_value": float(special_value),
            "mask_value": float(options["mask_value"]),
            "normalize_embedding": check_bool("normalize", normalize),
        }
        tokenizer = {"name": "binned_expression", "n_bins": options["n_bins"], "max_len": options["max_seq_len"]}
        return Foreign(
            family="scgpt",
            version=None,
            architecture=architecture,
            tokenizer=tokenizer,
            objective={"name": "masked_value_prediction", "mask_ratio": options["mask_ratio"]},
            vocab=genes,
            names=scgpt_names(order),
            tensors=read_weights(weights),
            source=str(source),
        )


_DEFAULTS: dict[str, Any] = {
    "dropout": 0.2,
    "n_bins": 51,
    "max_seq_len": 1200,
    "pad_token": PAD_TOKEN,
    "pad_value": -2,
    "mask_value": -1,
    "mask_ratio": 0.4,
}
_ONLY = {
    "input_emb_style": "continuous",
    "norm_scheme": "post",
    "pre_norm": False,
    "cell_emb_style": "cls",
    "input_style": "binned",
}
"""Options of which we have this value alone; scGPT's own defaults. Weights of both places of norms have equal names."""
_SIZES = ("embsize", "nlayers", "nheads", "d_hid")


def _args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that we need of those of a training."""
    if missing := [name for name in _SIZES if type(given.get(name)) is not int]:
        raise ModelFileError(f"args lacks {listing(missing)}; give the args.json that belongs to the checkpoint.")
    for name, value in _ONLY.items():
        if given.get(name, value) != value:
            raise ModelFileError(f"args has {name}={given[name]!r}, but scforge computes {value!r} alone.")
    options = _DEFAULTS | {name: value for name, value in given.items() if value is not None}
    for name in (*_SIZES, "n_bins", "max_seq_len"):
        if type(options[name]) is not int or options[name] < 1:
            raise ModelFileError(f"args has {name}={_shown(options[name])}, which is no size; give a whole number.")
    for name in ("dropout", "pad_value", "mask_value"):
        if not _is_number(options[name]):
            what = "as scGPT's scripts make of 'auto'" if options[name] == "auto" else "as scGPT has by default"
            raise ModelFileError(
                f"args has {name}={_shown(options[name])}, which is no finite number; give args with "
                f"{name}={_DEFAULTS[name]}, {what}."
            )
    return options


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number, in single precision, too."""
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and bool(-_LARGEST < value < _LARGEST)
    )


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _content(argument: str, given: Any, beside: Path) -> Mapping[str, Any]:
    """Return what was given, or what a JSON file holds."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, str | os.PathLike | None):
        raise OptionError(
            f"{argument}={_shown(given)} is neither a file nor a dictionary; give the published {beside.name}."
        )
    path = beside if given is None else Path(given)
    if not path.is_file():
        raise MissingFileError(f"{argument}={str(path)!r} does not exist; give the published {beside.name}.")
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelFileError(f"{argument}={str(path)!r} holds no names with values; give the published {beside.name}.")
    return content
