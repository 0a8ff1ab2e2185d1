"""Reading and writing of Geneformer checkpoints."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from scforge._checks import check_choice
from scforge._io import atomic_folder, parsed, read_json, sha256_of
from scforge._version import __version__
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError
from scforge.foreign.base import (
    Foreign,
    LeftOut,
    NameMap,
    Rule,
    first_file,
    folded_row,
    read_dictionary,
    read_options,
    read_weights,
    register_family,
    stacked,
)
from scforge.models.transformer_encoder import TransformerEncoder
from scforge.tokenizers.geneformer import MODEL_INPUT, geneformer_vocab

if TYPE_CHECKING:
    import pandas as pd

    type Dictionary = pd.DataFrame | str | os.PathLike[str] | Mapping[str, Any]


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_BARE = ("embeddings.", "encoder.", "pooler.")
"""Prefixes of weight names in a BERT model that was saved without a head."""
_MASKED_LM = "BertForMaskedLM"
_TOKENS_V2 = 20_275
"""Size of the published V2 vocabulary."""
_POOLING = {"V1": "genes", "V2": "cls"}
"""Pooling of Geneformer's ``EmbExtractor`` by version, applied to the layer below the last layer."""
_FILES = {"tokens": "token_dictionary*.pkl", "medians": "gene_median_dictionary*.pkl"}
_FOLDERS = {"V1": (".", "gene_dictionaries_30m", "geneformer/gene_dictionaries_30m"), "V2": (".", "geneformer")}
_LAYER, _OURS = "bert.encoder.layer.{i}.", "encoder.layers.{i}."

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
"""Options for which BERT supports only this value."""


def geneformer_names(*, tied: bool = True, n_types: int = 2, head: bool = True) -> NameMap:
    """Return the name map of a ``BertForMaskedLM``, or of the BERT model in a model for another task.

    Parameters
    ----------
    tied
        Whether the last layer of the head is the gene embedding.
    n_types
        Number of token types, of which cells use only the first.
    head
        Whether the masked language model head is present.
    """
    word = "bert.embeddings.word_embeddings.weight"
    queries = tuple(f"{_LAYER}attention.self.{part}.{{p}}" for part in ("query", "key", "value"))
    rules = [
        Rule(word, "embedding.gene_embedding.weight"),
        Rule(
            ("bert.embeddings.position_embeddings.weight", "bert.embeddings.token_type_embeddings.weight"),
            "embedding.position_embedding.weight",
            folded_row(n_types),
        ),
        Rule("bert.embeddings.LayerNorm.{p}", "embedding.layer_norm.{p}"),
        Rule(queries, f"{_OURS}attention.qkv.{{p}}", stacked(3)),
        Rule(f"{_LAYER}attention.output.dense.{{p}}", f"{_OURS}attention.out.{{p}}"),
        Rule(f"{_LAYER}attention.output.LayerNorm.{{p}}", f"{_OURS}norm_attention.{{p}}"),
        Rule(f"{_LAYER}intermediate.dense.{{p}}", f"{_OURS}ffn_in.{{p}}"),
        Rule(f"{_LAYER}output.dense.{{p}}", f"{_OURS}ffn_out.{{p}}"),
        Rule(f"{_LAYER}output.LayerNorm.{{p}}", f"{_OURS}norm_ffn.{{p}}"),
    ]
    left_out = [
        LeftOut("bert.embeddings.position_ids", "the numbers 0, 1, 2, ..., which are recreated"),
        LeftOut("bert.pooler.dense.{p}", "unused by the masked language model"),
    ]
    if not head:
        left_out.append(
            LeftOut("classifier.{p}", "the classifier of a task, whose classes the checkpoint does not name")
        )
        return NameMap("Geneformer", tuple(rules), tuple(left_out))
    rules.append(Rule("cls.predictions.transform.dense.{p}", "head.dense.{p}"))
    rules.append(Rule("cls.predictions.transform.LayerNorm.{p}", "head.layer_norm.{p}"))
    if tied:
        rules.append(Rule("cls.predictions.bias", "head.bias"))
        left_out.append(LeftOut("cls.predictions.decoder.weight", "the gene embedding again", same_as=word))
        left_out.append(LeftOut("cls.predictions.decoder.bias", "the same again", same_as="cls.predictions.bias"))
    else:
        rules.append(Rule("cls.predictions.decoder.{p}", "head.decoder.{p}"))
        left_out.append(LeftOut("cls.predictions.bias", "unused if the decoder has a bias"))
    return NameMap("Geneformer", tuple(rules), tuple(left_out))


@register_family("geneformer")
class Geneformer:
    """Folders written by ``BertForMaskedLM.save_pretrained``, with the Geneformer dictionaries."""

    def recognizes(self, source: Path) -> bool:
        """Return whether the folder contains a BERT configuration and weights."""
        config = source / "config.json"
        if not config.is_file() or not any((source / name).is_file() for name in _WEIGHTS):
            return False
        return read_options(config).get("model_type") == "bert"

    def read(
        self,
        source: Path,
        *,
        tokens_medians: pd.DataFrame | str | os.PathLike[str] | Sequence[Any] | None = None,
        version: str | None = None,
        ensembl_map: Dictionary | None = None,
        gene_names: Dictionary | None = None,
        pooling: str | None = None,
        embedding_layer: int | None = None,
    ) -> Foreign:
        """Read a folder; see :meth:`scforge.models.Encoder.from_checkpoint` for the arguments."""
        if not source.is_dir():
            raise MissingFileError(f"the checkpoint {str(source)!r} is not a folder; pass the folder with config.json.")
        where = source / "config.json"
        config = parsed(_Config, read_json(where), f"{str(where)!r} is not the configuration of a supported BERT model")
        if version is None:
            is_v2 = config.max_position_embeddings > MODEL_INPUT["V1"] or config.vocab_size == _TOKENS_V2
            version = "V2" if is_v2 else "V1"
        check_choice("version", version, MODEL_INPUT)
        vocab = _vocab(source, version, tokens_medians, ensembl_map, gene_names)
        if len(vocab) != config.vocab_size:
            raise ModelFileError(
                f"{str(where)!r} has vocab_size={config.vocab_size}, but tokens_medians has {len(vocab)} tokens; pass "
                "the files of this checkpoint."
            )
        tensors = read_weights(first_file(source, _WEIGHTS, "weights"))
        tensors = {f"bert.{name}" if name.startswith(_BARE) else name: value for name, value in tensors.items()}
        # A masked language model without its head is a corrupted file.
        head = any(name.startswith("cls.") for name in tensors) or _MASKED_LM in (config.architectures or [_MASKED_LM])
        tied, longest, activation = config.tie_word_embeddings, config.max_position_embeddings, config.hidden_act
        activation = "silu" if activation == "swish" else activation
        architecture = {
            "name": "transformer_encoder",
            "hidden_dim": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "ffn_dim": config.intermediate_size,
            "dropout": config.hidden_dropout_prob,
            "max_seq_len": longest,
            "activation": activation,
            "head_activation": activation,
            "layer_norm_eps": config.layer_norm_eps,
            "use_expression_values": False,
            "position_embedding": "learned",
            "norm_first": False,
            **({"tie_head": tied} if head else {"gene_head": False}),
            "n_special": vocab.n_special,
            "pooling": _POOLING[version] if pooling is None else pooling,
            "embedding_layer": min(1, config.num_hidden_layers - 1) if embedding_layer is None else embedding_layer,
        }
        with_ends = version == "V2"
        tokenizer = {
            "name": "rank_value",
            "max_len": min(MODEL_INPUT[version], longest),
            "append_cls": with_ends,
            "append_eos": with_ends,
        }
        return Foreign(
            family="geneformer",
            version=version,
            architecture=architecture,
            tokenizer=tokenizer,
            # In its pretraining masked tokens stay in their ranks.
            objective={"name": "masked_gene_prediction", "hide_order": False} if head else {"name": "joint_embedding"},
            vocab=vocab,
            names=geneformer_names(tied=tied, n_types=config.type_vocab_size, head=head),
            tensors=tensors,
            source=str(source),
        )


class _Config(BaseModel):
    """Fields of a BERT configuration that are read, or that must have a fixed value."""

    model_config = ConfigDict(strict=True)
    model_type: Literal["bert"] = "bert"
    architectures: list[str] | None = None
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    type_vocab_size: PositiveInt = 2
    hidden_act: Literal["relu", "gelu", "silu", "swish"]
    hidden_dropout_prob: NonNegativeFloat = 0.1
    layer_norm_eps: NonNegativeFloat = 1e-12
    tie_word_embeddings: bool = True
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False
    position_embedding_type: Literal["absolute"] = "absolute"
    pad_token_id: Literal[0] = 0


def _vocab(
    source: Path, version: str, tokens_medians: Any, ensembl_map: Dictionary | None, gene_names: Dictionary | None
) -> GeneVocab:
    """Return the vocabulary from dictionaries that are passed or found in the folder."""
    if tokens_medians is None or (isinstance(tokens_medians, str | os.PathLike) and Path(tokens_medians).is_dir()):
        folder = source if tokens_medians is None else Path(tokens_medians)
        paths: dict[str, Path] = {}
        for part in _FOLDERS[version]:  # the published repository has them in subfolders
            if len(paths) < len(_FILES):
                paths = {what: path for what, pattern in _FILES.items() if (path := _only(folder / part / pattern))}
        if len(paths) < len(_FILES):
            raise MissingFileError(
                f"the folder {str(folder)!r} must contain exactly one {_FILES['tokens']} and one {_FILES['medians']}; "
                "pass the two files as tokens_medians."
            )
        tokens_medians = (paths["tokens"], paths["medians"])
        beside = paths["tokens"].parent
        ensembl_map = _only(beside / "ensembl_mapping_dict*.pkl") if ensembl_map is None else ensembl_map
        gene_names = _only(beside / "gene_name_id_dict*.pkl") if gene_names is None else gene_names
    if isinstance(tokens_medians, tuple | list):
        tokens_medians = tuple(_opened(part) for part in tokens_medians)
    # V1 knows no former ids.
    vocab = geneformer_vocab(tokens_medians, version, _opened(ensembl_map))
    names = _gene_names(_opened(gene_names), set(vocab.genes))
    return replace(vocab, aliases=names | dict(vocab.aliases or {})) if names else vocab


def _only(pattern: Path) -> Path | None:
    """Return the file that matches a pattern, or None if no file or several files match."""
    matches = list(pattern.parent.glob(pattern.name))
    return matches[0] if len(matches) == 1 else None


def _opened(dictionary: Any) -> Any:
    """Return the content of a dictionary in a JSON or pickle file; other values are returned unchanged."""
    if isinstance(dictionary, str | os.PathLike) and Path(dictionary).suffix in (".pkl", ".pickle", ".json"):
        return read_dictionary(Path(dictionary))
    return dictionary


def _gene_names(names: Any, genes: set[str]) -> dict[str, str]:
    """Return a mapping from gene symbol to gene id."""
    if names is None:
        return {}
    if isinstance(names, str | os.PathLike):
        import pandas as pd

        if not Path(names).is_file():
            raise MissingFileError("does not exist; pass a parquet, JSON or pickle file.", gene_names=str(names))
        names = pd.read_parquet(names)
    if not isinstance(names, Mapping):
        if missing := [name for name in ("symbol", "gene_id") if name not in names]:
            raise DataError(
                f"lacks the column {missing[0]!r}; pass gene symbols and Ensembl ids.", argument="gene_names"
            )
        names = dict(zip(names["symbol"].astype(str), names["gene_id"].astype(str), strict=True))
    return {name: gene for name, gene in names.items() if gene in genes and name not in genes}


def to_geneformer(model: Any, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a model to a folder that ``transformers.BertForMaskedLM.from_pretrained`` can load.

    In addition to ``config.json`` and ``model.safetensors``, the function writes the dictionaries used by the
    Geneformer code: ``token_dictionary.pkl``, ``gene_median_dictionary.pkl`` if the vocabulary has medians, and
    ``ensembl_mapping_dict.pkl`` if it has aliases. These contain only text and numbers.

    Parameters
    ----------
    model
        A ``transformer_encoder`` with BERT options. For a fine-tuned model, the encoder is written without its head.
    folder
        Folder to create.
    overwrite
        Whether to replace the model in an existing folder; files not written by scforge are kept.

    Raises
    ------
    OptionError
        If the model uses options that BERT does not support, or `folder` exists.

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
    theirs = names.invert(model.fitted.backbone.state_dict())
    if not tied:
        # BERT keeps a second one, which it does not use.
        theirs["cls.predictions.bias"] = theirs["cls.predictions.decoder.bias"].clone()
    with atomic_folder(folder, overwrite=overwrite) as target:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in theirs.items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        vocab: GeneVocab = model.vocab
        files: dict[str, dict[str, Any]] = {"token_dictionary.pkl": {name: i for i, name in enumerate(vocab.tokens)}}
        if vocab.medians is not None:
            files["gene_median_dictionary.pkl"] = dict(zip(vocab.genes, vocab.medians.tolist(), strict=True))
        if vocab.aliases is not None:
            files["ensembl_mapping_dict.pkl"] = dict(vocab.aliases) | {gene: gene for gene in vocab.genes}
        for name, content in files.items():
            (target / name).write_bytes(pickle.dumps(content, protocol=4))
        sums = {path.name: sha256_of(path) for path in sorted(target.glob("*.pkl"))}
        config = _config(model, options) | {"sha256": sums}
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _options(model: Any) -> dict[str, Any]:
    """Return all options of the architecture. Raises an error if BERT does not support them."""
    spec = model.spec
    if spec.architecture != "transformer_encoder":
        raise OptionError(
            "cannot be exported to this format; use architecture='transformer_encoder'.", architecture=spec.architecture
        )
    if spec.tuning is not None and spec.tuning.lora is not None:
        raise OptionError("the model has low-rank adapters, which BERT does not support; fine-tune with lora=False.")
    defaults = {name: p.default for name, p in inspect.signature(TransformerEncoder).parameters.items()}
    options = defaults | spec.model_options
    for name, value in {**_NEEDED, "head_activation": options["activation"]}.items():
        if options[name] != value:
            raise OptionError(f"is not supported by BERT; use {name}={value!r}.", argument=name, value=options[name])
    return options


def _config(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the BERT configuration."""
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
