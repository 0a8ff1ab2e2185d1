"""The model folder: ``model.safetensors``, ``config.json``, ``vocab.json`` and ``README.md``. No pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from scforge._io import atomic_folder, check_inside, read_settled, sha256_of
from scforge.data.readers import is_url, write_h5ad
from scforge.data.sources import read_h5ad
from scforge.data.vocab import MOST_BYTES, GeneVocab
from scforge.errors import MissingFileError, ModelFileError, listing, warn
from scforge.estimators.folder_formats import MODEL, lacking, read_description, sealed
from scforge.estimators.shape_check import check_fit, misfit, shapes_of
from scforge.finetuning.held_out import SeenCells
from scforge.models._weights import PICKLES, read_shapes, read_weights, refuse_not_finite, refuse_pickle

if TYPE_CHECKING:
    from anndata import AnnData


_CONFIG, _VOCAB, _WEIGHTS, _CARD = "config.json", "vocab.json", "model.safetensors", "README.md"
_SPLIT, ADATA = "split.safetensors", "adata.h5ad"
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
    adata: AnnData | None = None,
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
        Replace the model in a folder that exists.
    seen
        The cells of a fine-tuning.
    adata
        Training data to write, too.
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
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        vocab.save(folder / _VOCAB)
        (folder / _CARD).write_text(card, encoding="utf-8")
        if seen is not None:
            seen.save(folder)
        if adata is not None:
            write_h5ad(folder / ADATA, adata)
        sums = {name: sha256_of(folder / name) for name in (_WEIGHTS, _VOCAB, *([] if adata is None else [ADATA]))}
        (folder / _CONFIG).write_text(sealed(MODEL, {**content, "sha256": sums}), encoding="utf-8")
        if extra is not None:
            extra(folder)


def read_folder(path: str | os.PathLike[str]) -> tuple[dict[str, Any], GeneVocab, dict[str, torch.Tensor]]:
    """Read a model folder of any format; return its description, vocabulary and weights.

    Nothing in it is run, and memory is taken for weights only when the file, the description and the vocabulary agree
    on their shapes.

    Raises
    ------
    MissingFileError
        If there is no such folder.
    ModelFileError
        If a file is missing, or its content is not what was saved.
    OptionError
        If an architecture, tokenizer, objective or task is not registered.
    """
    if is_url(path):
        raise MissingFileError(
            f"dir_path={os.fspath(path)!r} is no folder; get a model of the hub or the registry with "
            "Encoder.from_pretrained."
        )
    return read_settled(path, lambda: _read(Path(path)))


def read_adata(path: str | os.PathLike[str], config: Mapping[str, Any]) -> AnnData | None:
    """Read the training data that were saved with a model; None if none were.

    Raises
    ------
    ModelFileError
        If they are not what was saved.
    """
    file = Path(path) / ADATA
    if ADATA not in config["sha256"]:
        return None
    check_inside(file.parent, ADATA)
    if not file.exists():
        warn(f"The cells that were saved with the model, {str(file)!r}, are not there (push and pull leave them out).")
        return None
    _check_sum(file, config["sha256"][ADATA])
    return read_h5ad([str(file)])


def _read(folder: Path) -> tuple[dict[str, Any], GeneVocab, dict[str, torch.Tensor]]:
    path = folder
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.is_file() else "does not exist"
        raise MissingFileError(f"dir_path={str(path)!r} {what}; give the folder that model.save() wrote.")
    _check_files(folder)
    refuse_pickle(folder / _WEIGHTS)
    config = read_description(MODEL, folder / _CONFIG)
    _check_content(config, folder / _CONFIG)
    shapes = read_shapes(folder / _WEIGHTS)
    if (folder / _SPLIT).is_file():
        read_shapes(folder / _SPLIT)
    vocab = _read_vocab(folder / _VOCAB, config["sha256"].get(_VOCAB))
    check_fit(config, vocab, shapes, source=str(path))
    _check_sum(folder / _WEIGHTS, config["sha256"].get(_WEIGHTS))
    return config, vocab, read_weights(folder / _WEIGHTS)


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], *, source: str) -> None:
    """Load weights strictly, or say what does not fit.

    Raises
    ------
    ModelFileError
        If names or shapes differ, whole numbers stand where others belong, or a weight is NaN or infinite.
    """
    expected = shapes_of(module)
    if problem := misfit(expected, {name: tuple(value.shape) for name, value in weights.items()}):
        raise ModelFileError(f"the weights in {source!r} do not fit the architecture in its config: {problem}.")
    for name, value in module.state_dict().items():
        if value.is_floating_point() != weights[name].is_floating_point():
            raise ModelFileError(
                f"the weights in {source!r} hold {name!r} as {weights[name].dtype}, where {value.dtype} belongs; copy "
                "the model again."
            )
    refuse_not_finite(weights, module, source=source)
    module.load_state_dict({name: value.reshape(expected[name]) for name, value in weights.items()})


def _check_files(folder: Path) -> None:
    """Raise unless the files that are read are there, and in the folder."""
    if missing := [name for name in (_CONFIG, _VOCAB, _WEIGHTS) if not (folder / name).is_file()]:
        pickles = sorted(part.name for part in folder.iterdir() if part.suffix in PICKLES)
        beside = f" (what is there, {listing(pickles, most=3)}, are pickles, which are never opened)" if pickles else ""
        raise ModelFileError(
            f"the model folder {str(folder)!r} lacks {listing(missing)}{beside}; save or copy the model again."
        )
    for name in (_CONFIG, _VOCAB, _WEIGHTS, _SPLIT):
        check_inside(folder, name)


def _check_content(config: dict[str, Any], path: Path) -> None:
    """Raise unless a description holds all that loading reads of it."""
    if not (wrong := lacking(config, _CONTENT)):
        parts = ("architecture", "tokenizer", "objective")
        wrong += [f"{part}.name" for part in parts if not isinstance(config[part].get("name"), str)]
        keys = ("layer", "gene_key", "batch_key", "labels_key")
        wrong += [f"setup.{key}" for key in keys if not isinstance(config["setup"].get(key, 0), str | None)]
        wrong += ["tuning"] if not isinstance(config.get("tuning"), dict | None) else []
    if wrong:
        raise ModelFileError(f"{str(path)!r} lacks {listing(wrong)}; copy the model again.")


def _read_vocab(path: Path, checksum: Any) -> GeneVocab:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ModelFileError(
            f"{str(path)!r} has {size:,} bytes, where {MOST_BYTES:,} are the most that is read; copy the model again."
        )
    _check_sum(path, checksum)
    return GeneVocab.from_file(path)


def _check_sum(path: Path, checksum: Any) -> None:
    if sha256_of(path) != checksum:
        raise ModelFileError(
            f"{str(path)!r} is corrupted: its checksum is not the one in {_CONFIG}; copy the model again."
        )
