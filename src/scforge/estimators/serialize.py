"""Write and read model folders, i.e. descriptions, weights and vocabularies, with strict checks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from scforge._io import parsed, read_json, read_settled, sha256_of, sha256_of_json
from scforge._version import __version__
from scforge.data.paths import is_url
from scforge.data.vocab import GeneVocab
from scforge.errors import MissingFileError, ModelFileError, ScforgeError, first_line, listing
from scforge.estimators.spec import ModelSpec
from scforge.finetuning.adapters import is_adapter
from scforge.models._utils import without_weights
from scforge.models._weights import PICKLES, read_weights, refuse_not_finite

FORMAT = 2
MODEL, ADAPTER = "model", "adapter"
"""Kinds of model descriptions."""
_CHECKSUM = "checksum"
_OWN = "scforge."
"""Prefix of tensors that are saved with the weights and are not weights of the module."""
LANDMARKS, LABELED, BASE, CORRECTION = (f"{_OWN}{name}" for name in ("landmarks", "labeled.", "base.", "correction."))
"""Name of the embeddings of sampled training cells; prefixes of labeled cells, the base model, and the correction."""
_NUMBER = "$number"
"""Key for a number that JSON cannot represent, e.g. ``{"$number": "nan"}``."""

CONFIG, VOCAB, WEIGHTS, ADATA = "config.json", "vocab.json", "model.safetensors", "adata.h5ad"


class _Part(BaseModel):
    """An architecture, a tokenizer, an objective or a task, with its options."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str


class _Tuning(BaseModel):
    model_config = ConfigDict(strict=True)
    task: _Part
    n_latent: int
    lora: dict[str, Any] | None
    freeze: bool | int
    split: dict[str, Any]
    base: dict[str, Any]


class _Description(BaseModel):
    """The fields that loading reads from every description."""

    model_config = ConfigDict(strict=True)
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    n_epochs: int
    history: dict[str, list[float]]
    card: dict[str, Any] | None = None


class _Model(_Description):
    class_: Annotated[str, Field(alias="class")]
    architecture: _Part
    tokenizer: _Part
    objective: _Part
    setup: dict[str, Any]
    is_trained: bool
    sha256: dict[str, str]
    tuning: _Tuning | None = None


class _Adapter(_Description):
    vocab: str
    sha256: str
    tuning: _Tuning
    base: dict[str, Any] | None = None


def sealed(content: Mapping[str, Any]) -> str:
    """Return the JSON text of a description, with its format and checksum."""
    whole = {"format": FORMAT, "scforge_version": __version__, **_encoded(dict(content))}
    whole = json.loads(json.dumps(whole, allow_nan=False))  # as it will be read: keys are text
    return json.dumps({**whole, _CHECKSUM: sha256_of_json(whole, sort_keys=True)}, indent=2, allow_nan=False) + "\n"


def read_description(kind: str, path: Path) -> dict[str, Any]:
    """Return the content of a model or adapter description.

    Raises
    ------
    ModelFileError
        If it is not a model folder, has a later format, or was changed after saving.
    """
    content = read_json(path)
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise ModelFileError(
            f"{str(path)!r} has format {version}, but scforge {__version__} only reads format {FORMAT}; update scforge."
        )
    found: dict[str, Any] = _decoded(content)
    parsed(_Model if kind == MODEL else _Adapter, found, f"{str(path)!r} is not the description of an scforge {kind}")
    if content.pop(_CHECKSUM, None) != sha256_of_json(content, sort_keys=True):
        raise ModelFileError(f"{str(path)!r} is corrupted: its checksum does not match; copy the {kind} again.")
    return {name: value for name, value in found.items() if name != _CHECKSUM}


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(float(value))}
    if isinstance(value, dict):
        return {key: _encoded(part) for key, part in value.items()}
    return [_encoded(part) for part in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_NUMBER}:
            return float(value[_NUMBER])
        return {key: _decoded(part) for key, part in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value


type Shapes = Mapping[str, tuple[int, ...]]


def read_spec(content: Mapping[str, Any], vocab: GeneVocab, prefix: str) -> tuple[ModelSpec, nn.Module | None]:
    """Return a specification and its module on the meta device, or None if the constructor computes with weights."""
    spec = None
    try:
        spec = ModelSpec.from_json(content, vocab)
        spec.build_objective()
        with torch.random.fork_rng(devices=[]), without_weights():
            return spec, spec.build_module()
    except ScforgeError:
        raise
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if spec is not None and isinstance(error, RuntimeError) and "meta" in str(error):
            return spec, None
        raise ModelFileError(f"{prefix} describes a model that cannot be created: {first_line(error)}.") from error


def shapes_of(module: nn.Module) -> Shapes:
    """Return a mapping from name to shape for the weights of a module."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def part_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose name starts with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_weights(
    module: nn.Module,
    weights: dict[str, torch.Tensor],
    *,
    source: str,
    adapters: bool = False,
    assign: bool = False,
    known_finite: bool = False,
) -> None:
    """Load weights strictly. Raises an error that names any mismatch.

    Parameters
    ----------
    module, weights
        The module to load into, and the weights.
    source
        The folder, for messages.
    adapters
        Whether the weights contain only adapters and the head.
    assign
        Whether to replace the weight tensors of the module instead of copying into them, e.g. on the meta device.
    known_finite
        Whether the weights were checked before.

    Raises
    ------
    ModelFileError
        If names or shapes differ, or a weight is NaN or infinite.
    """
    weights = {name: value for name, value in weights.items() if not name.startswith(_OWN)}
    if not known_finite:
        refuse_not_finite(weights, module, source=source)
    try:
        missing, unknown = module.load_state_dict(weights, strict=False, assign=assign)
    except RuntimeError as error:
        problem = " ".join(str(error).partition(":")[2].split())[:400].rstrip(".")
    else:
        missing = [name for name in missing if not adapters or name.startswith("head.") or is_adapter(name)]
        differing = {"missing": missing, "unknown": unknown}
        problem = "; ".join(f"{what} {listing(names, most=3)}" for what, names in differing.items() if names)
    if problem:
        raise ModelFileError(f"the weights in {source!r} do not match the architecture in its config: {problem}.")


class StoredModel(NamedTuple):
    """The content of a model folder, see :func:`read_folder`."""

    content: dict[str, Any]
    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    is_checked: bool
    """Whether the weights are known to be finite and to match the specification; False if this needs a module."""


def read_folder(path: str | os.PathLike[str]) -> StoredModel:
    """Return the description, specification and weights in a model folder.

    No code in the folder is executed. Description, vocabulary and weights are checked for consistency.

    Raises
    ------
    MissingFileError
        If the folder does not exist.
    ModelFileError
        If a file is missing or corrupted.
    OptionError
        If an architecture, tokenizer, objective or task is not registered.
    """
    if is_url(path):
        raise MissingFileError("is not a folder; load hub models with Encoder.load.", dir_path=os.fspath(path))
    return read_settled(path, _read)


def _read(folder: Path) -> StoredModel:
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.is_file() else "does not exist"
        raise MissingFileError(f"{what}; pass a folder written by model.save().", dir_path=str(folder))
    if missing := [name for name in (CONFIG, VOCAB, WEIGHTS) if not (folder / name).is_file()]:
        pickles = sorted(part.name for part in folder.iterdir() if part.suffix in PICKLES)
        there = f" (pickle files are never opened: {listing(pickles, most=3)})" if pickles else ""
        raise ModelFileError(
            f"the model folder {str(folder)!r} does not contain {listing(missing)}{there}; save the model again."
        )
    content = read_description(MODEL, folder / CONFIG)
    weights = read_weights(folder / WEIGHTS)
    for name in (VOCAB, WEIGHTS):
        check_sum(folder / name, content["sha256"].get(name))
    vocab = GeneVocab.from_file(folder / VOCAB)
    spec, module = read_spec(content, vocab, f"the config in {str(folder)!r}")
    if module is not None:
        load_weights(module, weights, source=str(folder), assign=True)
    return StoredModel(content, spec, weights, is_checked=module is not None)


def check_sum(path: Path, checksum: str | None) -> None:
    """Raise a ModelFileError if the checksum of a file does not match."""
    if sha256_of(path) != checksum:
        raise ModelFileError(f"{str(path)!r} is corrupted: its checksum does not match; copy the file again.")
