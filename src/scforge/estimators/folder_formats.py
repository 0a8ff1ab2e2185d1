"""The descriptions in the folders of models and adapters: their checksum, their versions, and the way from old to new.

A description is a JSON file. Its field ``format`` says which version it is of; ``checksum``, its last field, is the
SHA-256 of all others as JSON with sorted keys, so that a file that is only laid out anew is the same. (Format 1 had
none.) The checksum finds accidents, not forgers, who can make a new one: what is read is therefore bounded and checked
besides.

A version that this scforge does not write any more is brought up to date step by step, by one function a version, in
memory; the folder stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scforge._io import read_json
from scforge._version import __version__
from scforge.errors import ModelFileError, first_line

_CHECKSUM = "checksum"
_NUMBER = "$number"
"""A number that JSON has no word for: ``{"$number": "nan"}``."""
_ODD = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Kind:
    """A kind of description: what it is called, its present format, and how a file of each earlier one is read."""

    name: str
    format: int
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]
    complete: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda content: content)
    """What puts in what the first folders of the present format did not say."""


_DEFAULTS: dict[str, dict[str, Any]] = {
    "autoregressive_transformer": {
        **{"n_bins": 51, "hidden_dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": None, "dropout": 0.1},
        **{"max_seq_len": 2048, "pooling": "cls", "activation": "gelu", "use_expression_values": True},
        **{"layer_norm_eps": 1e-12, "gene_loss_weight": 1.0, "expression_loss_weight": 1.0, "cell_loss_weight": 1.0},
        **{"gene_vectors": None, "n_conditions": 0, "position_embedding": "learned", "norm_first": True},
        **{"gradient_checkpointing": False, "unpad": None},
    },
    "gene_pooling": {
        **{"hidden_dim": 512, "num_layers": 2, "ffn_dim": None, "latent_dim": None, "dropout": 0.1},
        **{"max_seq_len": 2048, "pooling": "mean", "use_expression_values": True, "layer_norm_eps": 1e-12},
        **{"gene_vectors": None, "n_batches": None, "decoder_dim": 128, "n_special": 4, "projector_dim": None},
    },
    "masked_autoencoder": {
        **{"encoder_dim": 512, "encoder_layers": 12, "encoder_heads": 8, "ffn_dim": None, "dropout": 0.1},
        **{"decoder_dim": None, "decoder_layers": 4, "decoder_heads": None, "max_seq_len": 2048, "pooling": "mean"},
        **{"activation": "gelu", "use_expression_values": True, "layer_norm_eps": 1e-12, "gene_vectors": None},
        **{"position_embedding": "none", "norm_first": True, "gradient_checkpointing": False, "unpad": None},
        **{"value_loss": "mse"},
    },
    "mlp": {
        **{"hidden_dim": 512, "num_layers": 1, "latent_dim": 32, "ffn_dim": None, "dropout": 0.0},
        **{"layer_norm_eps": 1e-12, "gene_vectors": None, "n_batches": None, "decoder_dim": 128, "n_special": 4},
        **{"projector_dim": None},
    },
    "scdiva": {
        **{"hidden_dim": 1024, "num_layers": 24, "num_heads": 16, "ffn_dim": None, "dropout": 0.1, "max_tokens": 1200},
        **{"mode": "tokens", "norm_style": "post", "norm": "layer", "activation": "gelu", "bias": True},
        **{"final_norm": None, "latent_dim": 128, "num_cell_types": 0, "n_batches": 0, "variational": True},
        **{"denoising": False, "layer_norm_eps": 1e-12, "position_embedding": "none", "n_special": 4},
        **{"gradient_checkpointing": False, "unpad": None},
    },
    "transformer_encoder": {
        **{"hidden_dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": None, "dropout": 0.1},
        **{"max_seq_len": 2048, "pooling": "cls", "activation": "gelu", "use_expression_values": True},
        **{"layer_norm_eps": 1e-12, "gene_vectors": None, "position_embedding": "learned", "norm_first": True},
        **{"tie_head": False, "expression_head": None, "n_bins": None, "expression_loss_weight": 1.0},
        **{"gradient_checkpointing": False, "unpad": None, "gene_head": True, "head_activation": "gelu"},
        **{"value_encoder": "linear", "n_value_bins": None, "value_bins_alpha": 1.0, "embedding_norm": "sum"},
        **{"n_special": 0, "special_value": None, "mask_value": None, "final_norm": None, "embedding_layer": 0},
    },
}
"""The defaults of the time of format 1 and of the first folders of format 2, which did not write them. They stay as
they are when a constructor has others."""


def _with_options(content: dict[str, Any]) -> dict[str, Any]:
    """Spell out the options of an architecture that the first folders left to its constructor."""
    options = content.get("architecture")
    name = options.get("name") if isinstance(options, dict) else None
    if not isinstance(options, dict) or not isinstance(name, str):
        return content
    unsaid = {option: value for option, value in _DEFAULTS.get(name, {}).items() if option not in options}
    return {**content, "architecture": {**options, **unsaid}}


def _model_from_1(content: dict[str, Any]) -> dict[str, Any]:
    """Format 2 adds the checksum of the description; all that it says is said as before."""
    return {**content, "format": 2}


def _adapter_from_1(content: dict[str, Any]) -> dict[str, Any]:
    """Format 2 adds the checksum of the description; all that it says is said as before."""
    return {**content, "format": 2}


MODEL = Kind("model", 2, {1: _model_from_1}, _with_options)
ADAPTER = Kind("adapter", 2, {1: _adapter_from_1})


def sealed(kind: Kind, content: Mapping[str, Any]) -> str:
    """Return the text of a description, with its format and its checksum."""
    whole = {"format": kind.format, "scforge_version": __version__, **_encoded(dict(content))}
    whole = json.loads(json.dumps(whole, allow_nan=False))  # as it will be read: keys are text
    return json.dumps({**whole, _CHECKSUM: _digest(whole)}, indent=2, allow_nan=False) + "\n"


def read_description(kind: Kind, path: Path) -> dict[str, Any]:
    """Return what a description of any format says, in the present one.

    Raises
    ------
    ModelFileError
        If it is none, of a later format, or not what was saved.
    """
    wrong = f"{str(path)!r} is not the description of an scforge {kind.name}"
    try:
        # Format 1 wrote numbers that are none as Python does.
        content = read_json(path, finite=False)
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{wrong}: {first_line(error)}.") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise ModelFileError(f"{wrong}: it says no format.")
    if version > kind.format:
        raise ModelFileError(
            f"the {kind.name} {str(path.parent)!r} has format {version} (scforge {content.get('scforge_version')}), "
            f"this is scforge {__version__} with format {kind.format}; update scforge."
        )
    stored = content.pop(_CHECKSUM, None)
    try:
        if stored != (None if version == 1 and stored is None else _digest(content)):
            raise ModelFileError(
                f"{str(path)!r} is corrupted: its content does not fit the checksum in it; copy the {kind.name} again."
            )
        content = _decoded(content)
    except RecursionError:
        raise ModelFileError(f"{wrong}: it is nested too deeply.") from None
    except ValueError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{wrong}: it holds a number that is not finite.") from error
    for step in range(version, kind.format):
        content = kind.upgrades[step](content)
    return kind.complete(content)


def lacking(content: Mapping[str, Any], kinds: Mapping[str, type]) -> list[str]:
    """Return what a description lacks of fields of these types, and which lines of its history are no figures."""

    def fits(value: Any, kind: type) -> bool:
        return isinstance(value, kind) and not (kind is int and isinstance(value, bool))

    def are_figures(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) in (int, float) for value in values)

    wrong = [name for name, kind in kinds.items() if not fits(content.get(name), kind)]
    return wrong or [f"history.{name}" for name, values in content["history"].items() if not are_figures(values)]


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=content["format"] == 1).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(float(value))}
    if isinstance(value, dict):
        return {key: _encoded(part) for key, part in value.items()}
    return [_encoded(part) for part in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_NUMBER} and value[_NUMBER] in _ODD:
            return float(value[_NUMBER])
        return {key: _decoded(part) for key, part in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value
