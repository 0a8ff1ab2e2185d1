"""Write and read model folders: descriptions, strict weights and vocabularies."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from scforge._io import atomic_folder, check_inside, read_json, read_settled, sha256_of
from scforge._version import __version__
from scforge.data.readers import is_url, write_h5ad
from scforge.data.sources import read_h5ad
from scforge.data.vocab import MAX_BYTES, GeneVocab
from scforge.errors import MissingFileError, ModelFileError, ScforgeError, first_line, listing, warn
from scforge.estimators.spec import FineTuneSpec, ModelSpec, default_options, defaults_for
from scforge.finetuning.adapters import is_adapter
from scforge.finetuning.base import TASKS
from scforge.finetuning.held_out import SeenCells
from scforge.foreign.base import Foreign
from scforge.models._weights import PICKLES, read_shapes, read_weights, refuse_not_finite, refuse_pickle
from scforge.models.registry import MODELS
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import OBJECTIVES

if TYPE_CHECKING:
    from anndata import AnnData


_CHECKSUM = "checksum"
_NUMBER = "$number"
"""A number that JSON has no word for: ``{"$number": "nan"}``."""
_ODD = ("nan", "inf", "-inf")


FORMAT = 2
MODEL, ADAPTER = "model", "adapter"
"""Kinds of descriptions."""


def sealed(content: Mapping[str, Any]) -> str:
    """Return the text of a description, with its format and its checksum."""
    whole = {"format": FORMAT, "scforge_version": __version__, **_encoded(dict(content))}
    whole = json.loads(json.dumps(whole, allow_nan=False))  # as it will be read: keys are text
    return json.dumps({**whole, _CHECKSUM: _digest(whole)}, indent=2, allow_nan=False) + "\n"


def read_description(kind: str, path: Path) -> dict[str, Any]:
    """Return what a description of a model or an adapter says.

    Raises
    ------
    ModelFileError
        If it is none, of a later format, or not what was saved.
    """
    wrong = f"{str(path)!r} is not the description of an scforge {kind}"
    try:
        content = read_json(path)
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{wrong}: {first_line(error)}.") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version < FORMAT:
        raise ModelFileError(f"{wrong}: it says no format.")
    if version > FORMAT:
        raise ModelFileError(
            f"the {kind} {str(path.parent)!r} has format {version} (scforge {content.get('scforge_version')}), "
            f"this is scforge {__version__} with format {FORMAT}; update scforge."
        )
    stored = content.pop(_CHECKSUM, None)
    try:
        if stored != _digest(content):
            raise ModelFileError(
                f"{str(path)!r} is corrupted: its content does not fit the checksum in it; copy the {kind} again."
            )
        return cast("dict[str, Any]", _decoded(content))
    except RecursionError:
        raise ModelFileError(f"{wrong}: it is nested too deeply.") from None


def lacking(content: Mapping[str, Any], kinds: Mapping[str, type]) -> list[str]:
    """Return what a description lacks of fields of these types, and which lines of its history are no figures."""

    def fits(value: Any, kind: type) -> bool:
        return isinstance(value, kind) and not (kind is int and isinstance(value, bool))

    def are_figures(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) in (int, float) for value in values)

    wrong = [name for name, kind in kinds.items() if not fits(content.get(name), kind)]
    return wrong or [f"history.{name}" for name, values in content["history"].items() if not are_figures(values)]


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


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


Shapes = Mapping[str, tuple[int, ...]]

UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What constructors raise for options that cannot be."""
_MAX_ITEMS = 2**20


class TooManyError(Exception):
    """A module has far more parts than there are weights."""


def check_fit(config: Mapping[str, Any], vocab: GeneVocab, found: Shapes, *, source: str) -> None:
    """Raise unless weights of these shapes are those of the model that a description is of.

    Parameters
    ----------
    config
        The description; its parts ``architecture``, ``tokenizer``, ``objective`` and ``tuning`` are read.
    vocab
        The genes.
    found
        Shape of each tensor in the file.
    source
        The folder, for the message.

    Raises
    ------
    ModelFileError
        If the description cannot be one; else saying which weights differ.
    OptionError
        If the description names a part that is not registered.
    """
    parts = {part: dict(config[part]) for part in ("architecture", "tokenizer", "objective")}
    names = {part: parts[part].pop("name") for part in parts}
    for part, registry in {"architecture": MODELS, "tokenizer": TOKENIZERS, "objective": OBJECTIVES}.items():
        registry.get(names[part])
    # What the constructor takes anyway is no claim of this folder.
    usual = default_options(names["architecture"])
    claimed = {n: value for n, value in parts["architecture"].items() if n not in usual or value != usual[n]}
    for part, options in (parts | {"architecture": claimed}).items():
        _refuse_files(part, options)
    tuning = _tuning_of(config.get("tuning"), source)
    refuse_counts({**claimed, "n_latent": tuning and tuning.n_latent}, found)
    with _said(source, len(found)):
        spec, _ = ModelSpec.resolve(
            defaults_for(names["architecture"], parts["architecture"]),
            vocab,
            tokenizer=(names["tokenizer"], parts["tokenizer"]),
            objective=(names["objective"], parts["objective"]),
            options=parts["architecture"],
        )
        spec = replace(spec, tuning=tuning)
        spec.build_objective()
        expected = described_shapes(spec, len(found))
    if expected is not None and (problem := misfit(expected, found)):
        raise ModelFileError(f"the weights in {source!r} do not fit the architecture in its config: {problem}.")


def check_adapter(base: ModelSpec, content: Any, found: Shapes, *, n_base: int, source: str) -> FineTuneSpec:
    """Return the fine-tuning that an adapter is of, or raise unless its weights fit on a base model.

    Parameters
    ----------
    base
        The base model.
    content
        What the description says of the fine-tuning.
    found
        Shape of each tensor in the file.
    n_base
        Number of tensors of the base model.
    source
        The folder, for the message.

    Raises
    ------
    ModelFileError
        Saying what does not fit.
    OptionError
        If the task is not registered.
    """
    tuning = _tuning_of(content, source)
    if tuning is None or tuning.lora is None:
        raise ModelFileError(f"the description in {source!r} is of no adapters; copy the folder again.")
    refuse_counts({"n_latent": tuning.n_latent, **tuning.lora}, found)
    with _said(source, len(found) + n_base):
        spec = replace(base, tuning=tuning)
        spec.build_objective()
        expected = described_shapes(spec, len(found) + n_base)
    if expected is not None:
        expected = {n: shape for n, shape in expected.items() if n.startswith("head.") or is_adapter(n)}
        if problem := misfit(expected, found):
            raise ModelFileError(f"the weights in {source!r} do not fit their description: {problem}.")
    return tuning


def refuse_counts(options: Mapping[str, Any], found: Shapes) -> None:
    """Raise if a number is beyond all that weights could be of: constructors make lists of so many items."""
    most = max(_MAX_ITEMS, sum(math.prod(shape) for shape in found.values()))
    for name, value in options.items():
        if isinstance(value, Mapping):
            refuse_counts(value, found)
        elif isinstance(value, int) and value > most:
            raise ModelFileError(
                f"the config claims {name}={value}, and the weights hold fewer numbers; do not trust this folder."
            )


def _tuning_of(content: Any, source: str) -> FineTuneSpec | None:
    tuning = FineTuneSpec.from_json(content, source=source)
    if tuning is not None:
        kinds = {"task": str, "lora": dict | None, "split": dict, "base": dict}
        if not all(isinstance(getattr(tuning, name), kind) for name, kind in kinds.items()):
            raise ModelFileError(f"the description of the fine-tuning in {source!r} is not whole; copy it again.")
        TASKS.get(tuning.task)
    return tuning


@contextmanager
def _said(source: str, n_tensors: int) -> Iterator[None]:
    """Say what is wrong with a description whose parts cannot be made."""
    try:
        yield
    except TooManyError:
        raise ModelFileError(
            f"the config in {source!r} describes a model of far more parts than the {n_tensors:,} tensors that are "
            "there; copy the folder again."
        ) from None
    except UNUSABLE as error:
        raise ModelFileError(
            f"the config in {source!r} describes no model that can be made: {first_line(error)}."
        ) from error


def misfit(expected: Shapes, found: Shapes) -> str:
    """Return in a few words how shapes differ from those that are expected; nothing where they are the same."""
    missing = sorted(set(expected) - set(found))
    surplus = sorted(set(found) - set(expected))
    # A module that was trained in shares had lists of one in place of numbers.
    shapes = [n for n in expected if n in found and found[n] not in (expected[n], expected[n] or (1,))]
    parts = [
        f"{what} {listing(names, most=3)}" for what, names in (("missing", missing), ("unknown", surplus)) if names
    ]
    parts += [f"{name!r} is {found[name]} instead of {expected[name]}" for name in shapes[:3]]
    return "; ".join([*parts, f"{len(shapes) - 3} more shapes"] if len(shapes) > 3 else parts)


def _refuse_files(part: str, options: Mapping[str, Any]) -> None:
    """Raise if an option is the name of a file: a model folder brings all that it needs."""
    for name, value in options.items():
        if part != "objective" and isinstance(value, str) and (re.search(r"[/\\]", value) or PurePath(value).suffix):
            raise ModelFileError(
                f"the config names a file, {part}.{name}={value[:80]!r}, which a model folder never does; do not trust "
                "this folder."
            )


def described_shapes(spec: ModelSpec, n_tensors: int) -> Shapes | None:
    """Return the shapes of the weights that a description asks for; takes no memory for them.

    None for an architecture that cannot be made without its weights, because its constructor computes with them.

    Raises
    ------
    TooManyError
        If it has far more parts than `n_tensors`; whatever the constructors raise for options that cannot be.
    """
    try:
        with torch.random.fork_rng(devices=[]), _bounded(n_tensors), torch.device("meta"):
            module = spec.build_module()
    except RuntimeError as error:
        if "meta" in str(error) and "tensor" in str(error).lower():
            return None
        raise
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


@contextmanager
def _bounded(n_tensors: int) -> Iterator[None]:
    """Stop the making of modules with far more parts than `n_tensors`, e.g. a billion layers."""
    left = Counter(parameters=8 * n_tensors + 256, modules=64 * n_tensors + 4096)

    def count(what: str) -> None:
        left[what] -= 1
        if left[what] < 0:
            raise TooManyError

    hooks = [
        register_module_parameter_registration_hook(lambda *_: count("parameters")),
        register_module_module_registration_hook(lambda *_: count("modules")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def shapes_of(module: nn.Module) -> Shapes:
    """Return the shape of each weight of a module."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


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
        (folder / _CONFIG).write_text(sealed({**content, "sha256": sums}), encoding="utf-8")
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
            f"dir_path={os.fspath(path)!r} is no folder; get a model of the hub or the registry with Encoder.load."
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
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ModelFileError(
            f"{str(path)!r} has {size:,} bytes, where {MAX_BYTES:,} are the most that is read; copy the model again."
        )
    _check_sum(path, checksum)
    return GeneVocab.from_file(path)


def _check_sum(path: Path, checksum: Any) -> None:
    if sha256_of(path) != checksum:
        raise ModelFileError(
            f"{str(path)!r} is corrupted: its checksum is not the one in {_CONFIG}; copy the model again."
        )


def expected_of(found: Foreign) -> Shapes | None:
    """Return the shapes of the weights that a checkpoint's config asks for; see :func:`described_shapes`.

    Raises
    ------
    ModelFileError
        If it describes no model that can be made, or one of far more parts than the checkpoint has weights.
    """
    architecture, tokenizer, objective = (dict(part) for part in (found.architecture, found.tokenizer, found.objective))
    name, *others = (part.pop("name") for part in (architecture, tokenizer, objective))
    refuse_counts({**architecture, **tokenizer}, {name: tuple(value.shape) for name, value in found.tensors.items()})
    spec, _ = ModelSpec.resolve(
        defaults_for(name, architecture),
        found.vocab,
        tokenizer=(others[0], tokenizer),
        objective=(others[1], objective),
        options=architecture,
    )
    try:
        return described_shapes(spec, len(found.tensors))
    except TooManyError:
        raise ModelFileError(
            f"the config of {found.source!r} describes a model of far more parts than the {len(found.tensors):,} "
            "weights that are there; give the config that belongs to the checkpoint."
        ) from None
    except ScforgeError:
        raise
    except UNUSABLE as error:
        raise ModelFileError(
            f"the config of {found.source!r} describes no model that can be made: {first_line(error)}."
        ) from error
