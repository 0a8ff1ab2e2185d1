"""The model folder: ``model.safetensors``, ``config.json``, ``vocab.json`` and ``README.md``. No pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from scforge._io import atomic_folder, sha256_of
from scforge._version import __version__
from scforge.data.vocab import GeneVocab
from scforge.errors import MissingFileError, ModelFileError, first_line, listing
from scforge.finetuning.seen import SeenCells

__all__ = ["load_weights", "read_folder", "write_folder"]

_CONFIG, _VOCAB, _WEIGHTS, _CARD = "config.json", "vocab.json", "model.safetensors", "README.md"
_FORMAT = 1
_CONTENT = {
    "class": str,
    "architecture": dict,
    "tokenizer": dict,
    "objective": dict,
    "setup": dict,
    "seed": int,
    "is_trained": bool,
    "n_epochs": int,
    "history": dict,
    "sha256": dict,
}
"""What loading reads of the description, and its type."""


def write_folder(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    vocab: GeneVocab,
    content: dict[str, Any],
    card: str,
    overwrite: bool,
    seen: SeenCells | None = None,
    extra: Any = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a model folder: all of it, or nothing.

    Parameters
    ----------
    path
        Folder to make.
    module, vocab
        Weights and vocabulary.
    content
        JSON-safe description of the model.
    card
        Text of the model card.
    overwrite
        Replace a folder that exists.
    seen
        The cells of a fine-tuning.
    extra
        Called with the folder before it is put in place, to write further files.
    weights
        Weights to write in place of those that the module has now.

    Raises
    ------
    OSError
        If there is no room, or no permission.
    """
    with atomic_folder(path, overwrite=overwrite) as folder:
        source = module.state_dict() if weights is None else weights
        tensors = {name: value.detach().cpu().contiguous() for name, value in source.items()}
        try:
            save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # what the system said stands in its text only
            raise OSError(f"{str(folder / _WEIGHTS)!r} cannot be written: {first_line(error)}.") from error
        vocab.save(folder / _VOCAB)
        (folder / _CARD).write_text(card, encoding="utf-8")
        if seen is not None:
            seen.save(folder)
        if extra is not None:
            extra(folder)
        sums = {name: sha256_of(folder / name) for name in (_WEIGHTS, _VOCAB)}
        config = {"format": _FORMAT, "scforge_version": __version__, **content, "sha256": sums}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_folder(path: str | os.PathLike[str]) -> tuple[dict[str, Any], GeneVocab, dict[str, torch.Tensor]]:
    """Read a model folder; return its description, vocabulary and weights.

    Raises
    ------
    MissingFileError
        If there is no such folder.
    ModelFileError
        If a file is missing, or its content is not what was saved.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.is_file() else "does not exist"
        raise MissingFileError(f"dir_path={str(path)!r} {what}; give the folder that model.save() wrote.")
    if missing := [name for name in (_CONFIG, _VOCAB, _WEIGHTS) if not (folder / name).is_file()]:
        raise ModelFileError(f"the model folder {str(path)!r} lacks {listing(missing)}; save or copy the model again.")
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        version = int(config["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"{str(folder / _CONFIG)!r} is not the description of an scforge model: {error}."
        ) from error
    if version > _FORMAT:
        raise ModelFileError(
            f"the model {str(path)!r} has format {version} (scforge {config.get('scforge_version')}), "
            f"this is scforge {__version__} with format {_FORMAT}; update scforge."
        )
    if wrong := [name for name, kind in _CONTENT.items() if not isinstance(config.get(name), kind)]:
        raise ModelFileError(f"{str(folder / _CONFIG)!r} lacks {listing(wrong)}; copy the model again.")
    nested = [f"{part}.name" for part in ("architecture", "tokenizer", "objective") if "name" not in config[part]]
    nested += [f"setup.{key}" for key in ("layer", "gene_key", "batch_key", "labels_key") if key not in config["setup"]]
    nested += [f"history.{name}" for name, values in config["history"].items() if not isinstance(values, list)]
    if nested:
        raise ModelFileError(f"{str(folder / _CONFIG)!r} lacks {listing(nested)}; copy the model again.")
    for name in (_WEIGHTS, _VOCAB):
        if sha256_of(folder / name) != config["sha256"].get(name):
            raise ModelFileError(
                f"{str(folder / name)!r} is corrupted: its checksum is not the one in {_CONFIG}; copy the model again."
            )
    try:
        weights = load_file(folder / _WEIGHTS)
    except SafetensorError as error:
        raise ModelFileError(f"{str(folder / _WEIGHTS)!r} is not a safetensors file: {error}.") from error
    return config, GeneVocab.from_file(folder / _VOCAB), weights


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], *, source: str) -> None:
    """Load weights strictly, or say what does not fit.

    Raises
    ------
    ModelFileError
        If names or shapes differ.
    """
    expected = module.state_dict()
    # A module that was trained in shares had lists of one in place of numbers.
    lists = {n for n in set(expected) & set(weights) if expected[n].ndim == 0 and weights[n].shape == (1,)}
    weights = {n: value.reshape(()) if n in lists else value for n, value in weights.items()}
    missing = sorted(set(expected) - set(weights))
    surplus = sorted(set(weights) - set(expected))
    shapes = [n for n in expected if n in weights and expected[n].shape != weights[n].shape]
    if missing or surplus or shapes:
        parts = [
            f"{what} {listing(names, most=3)}" for what, names in (("missing", missing), ("unknown", surplus)) if names
        ]
        parts += [f"{n!r} is {tuple(weights[n].shape)} instead of {tuple(expected[n].shape)}" for n in shapes[:3]]
        raise ModelFileError(
            f"the weights in {source!r} do not fit the architecture in its config: {'; '.join(parts)}."
        )
    module.load_state_dict(weights)
