"""scGPT (Cui et al. 2024): the weights of its ``TransformerModel``, with or without flash attention.

https://doi.org/10.1038/s41592-024-02201-0
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt

from scforge._constants import CLS_TOKEN, MASK_TOKEN, PAD_TOKEN
from scforge._io import parsed
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, listing
from scforge.foreign.base import (
    Foreign,
    LeftOut,
    NameMap,
    Rule,
    first_file,
    in_order,
    read_options,
    read_weights,
    register_family,
    rows_in_order,
)

_WEIGHTS = ("best_model.pt", "model.pt", "model.safetensors")
_VOCAB, _ARGS = "vocab.json", "args.json"
_LAYER, _OURS = "transformer_encoder.layers.{i}.", "encoder.layers.{i}."


def scgpt_names(order: tuple[int, ...]) -> NameMap:
    """Return the name map of a ``TransformerModel``; `order` contains the scGPT token id of each scforge token."""
    rules = (
        Rule("encoder.embedding.weight", "embedding.gene_embedding.weight", rows_in_order(order)),
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
        LeftOut("cls_decoder.*", "classes of a fine-tuned model; finetune('annotation') trains a new head"),
        LeftOut("mvc_decoder.*", "expression from the cell embedding, which no objective here predicts"),
        LeftOut("flag_encoder.*", "marks of given genes in its generative training; embedding cells takes none"),
        LeftOut("grad_reverse_discriminator.*", "the adversary used in fine-tuning, not part of the model"),
    )
    return NameMap("scGPT", rules, left_out)


def scgpt_vocab(tokens: Mapping[str, int]) -> tuple[GeneVocab, tuple[int, ...]]:
    """Return the scforge vocabulary for a published vocabulary, and the scGPT id of each scforge token (-1 for none).

    Special tokens come first in scforge. scGPT masks values rather than genes, so it has no MASK token; in scforge,
    MASK has no vector.

    Parameters
    ----------
    tokens
        A mapping from gene symbol or special token to token id.

    Raises
    ------
    DataError
        If `tokens` is not an scGPT vocabulary.
    """
    names = in_order(tokens)
    if missing := [name for name in (PAD_TOKEN, CLS_TOKEN) if name not in tokens]:
        raise DataError(
            f"lacks the special tokens {listing(missing)}; pass the published vocab.json.", argument="vocab"
        )
    special = [name for name in names if name.startswith("<") and name.endswith(">")]
    ours = list(dict.fromkeys([PAD_TOKEN, MASK_TOKEN, CLS_TOKEN, *special]))
    genes = [name for name in names if name not in set(ours)]
    vocab = GeneVocab(genes=tuple(genes), release="scGPT", special_tokens=tuple(ours))
    return vocab, tuple(int(tokens.get(name, -1)) for name in vocab.tokens)


@register_family("scgpt")
class ScGPT:
    """Folders of a published scGPT model: ``best_model.pt``, ``vocab.json``, ``args.json``."""

    def recognizes(self, source: Path) -> bool:
        """Return whether the folder contains a vocabulary and training arguments."""
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
        given = {name: value for name, value in _content("args", args, folder / _ARGS).items() if value is not None}
        options = parsed(_Args, given, "args contains options that scforge does not support")
        genes, order = scgpt_vocab(_content("vocab", vocab, folder / _VOCAB))
        architecture = {
            "name": "transformer_encoder",
            "hidden_dim": options.embsize,
            "num_layers": options.nlayers,
            "num_heads": options.nheads,
            "ffn_dim": options.d_hid,
            "dropout": options.dropout,
            "max_seq_len": options.max_seq_len,
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
            "special_value": float(options.pad_value if cls_value is None else cls_value),
            "mask_value": float(options.mask_value),
            "normalize_embedding": normalize,
        }
        tokenizer = {"name": "binned_expression", "n_bins": options.n_bins, "max_len": options.max_seq_len}
        return Foreign(
            family="scgpt",
            version=None,
            architecture=architecture,
            tokenizer=tokenizer,
            objective={"name": "masked_value_prediction", "mask_ratio": options.mask_ratio},
            vocab=genes,
            names=scgpt_names(order),
            tensors=read_weights(weights),
            source=str(source),
        )


class _Args(BaseModel):
    """Training options that are read, or that must have a fixed value; defaults are the scGPT defaults."""

    model_config = ConfigDict(strict=True)
    embsize: PositiveInt
    nlayers: PositiveInt
    nheads: PositiveInt
    d_hid: PositiveInt
    dropout: FiniteFloat = 0.2
    n_bins: PositiveInt = 51
    max_seq_len: PositiveInt = 1200
    pad_value: FiniteFloat = -2
    mask_value: FiniteFloat = -1
    mask_ratio: Any = 0.4
    pad_token: Literal["<pad>"] = "<pad>"
    input_emb_style: Literal["continuous"] = "continuous"
    norm_scheme: Literal["post"] = "post"  # weights of both places of norms have equal names
    pre_norm: Literal[False] = False
    cell_emb_style: Literal["cls"] = "cls"
    input_style: Literal["binned"] = "binned"


def _content(argument: str, given: Any, beside: Path) -> Mapping[str, Any]:
    """Return the given object, or the content of a JSON file."""
    if isinstance(given, Mapping):
        return given
    path = beside if given is None else Path(given)
    if not path.is_file():
        raise MissingFileError(f"does not exist; pass the published {beside.name}.", argument=argument, value=str(path))
    return read_options(path)
