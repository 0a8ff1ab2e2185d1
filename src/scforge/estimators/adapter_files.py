"""Adapters and heads without the model that they sit on."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from scforge._io import atomic_folder, sha256_of
from scforge._version import __version__
from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.estimators.finetuning_run import set_up
from scforge.estimators.registries import bare_registry
from scforge.estimators.tuning import Tuning
from scforge.finetuning.adapters import adapters_disabled, digest_of, has_lora, is_adapter, merge_lora, merged
from scforge.finetuning.seen import SeenCells

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.estimators.encoder import Encoder

__all__ = ["AdapterMethods", "load_adapter", "save_adapter"]

_CONFIG, _WEIGHTS = "adapter.json", "adapter.safetensors"
_FORMAT = 1


class AdapterMethods:
    """Methods around adapters."""

    def save_adapter(self: Any, dir_path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save what fine-tuning with ``lora`` has learned, the adapters and the head: a few megabytes.

        Parameters
        ----------
        dir_path
            Folder to make. It appears whole or not at all.
        overwrite
            Replace a folder that exists.

        Raises
        ------
        OptionError
            If the model has no adapters.
        """
        self._task("save_adapter")
        save_adapter(self, dir_path, overwrite=overwrite)

    @classmethod
    def load_adapter(
        cls, base: Encoder, dir_path: str | os.PathLike[str], adata: AnnData | None = None, *, share: bool = True
    ) -> Encoder:
        """Put adapters and a head that :meth:`save_adapter` wrote on the model that they were trained on.

        Parameters
        ----------
        base
            The model that was fine-tuned.
        dir_path
            The folder.
        adata
            Data to go on with.
        share
            Use the weights of `base` in place of a copy, so that many adapters on one base take no more memory.

        Raises
        ------
        MissingFileError, ModelFileError
            If the folder cannot be used, or was made with another base.
        """
        return load_adapter(cls, base, dir_path, adata, share=share)

    def merge_adapter(self: Any) -> None:
        """Add the adapters to the weights: the same predictions, at the cost of a model without adapters."""
        self._task("merge_adapter")
        if not has_lora(self.backbone):
            raise OptionError("the model has no adapters to merge; fine-tune with lora=True.")
        merge_lora(self.backbone)
        self.backbone.requires_grad_(True)
        self._spec = replace(self._spec, tuning=replace(self._spec.tuning, lora=None))

    @contextmanager
    def adapter_disabled(self: Any) -> Iterator[None]:
        """Compute as before fine-tuning, without the adapters, e.g. ``with annotator.adapter_disabled(): ...``."""
        if not has_lora(self.backbone):
            raise OptionError("the model has no adapters to disable; fine-tune with lora=True.")
        with adapters_disabled(self.backbone):
            yield


def save_adapter(model: Encoder, dir_path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Do what :meth:`scforge.models.Encoder.save_adapter` says."""
    tuning = model.spec.tuning
    if tuning is None or tuning.lora is None:
        raise OptionError("the model has no adapters to save; fine-tune with lora=True, or save all of it with save().")
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in model.module.state_dict().items()
        if name.startswith("head.") or is_adapter(name)
    }
    with atomic_folder(dir_path, overwrite=overwrite) as folder:
        if model._seen is not None:
            model._seen.save(folder)
        save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
        content = {
            "format": _FORMAT,
            "scforge_version": __version__,
            "architecture": model.spec.architecture,
            "vocab": model.vocab.hash,
            "tuning": tuning.to_json(),
            "seed": model.seed,
            "n_epochs": model.n_epochs_,
            "history": {name: frame[name].tolist() for name, frame in model.history_.items()},
            "sha256": sha256_of(folder / _WEIGHTS),
        }
        (folder / _CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_adapter(
    cls: Any, base: Encoder, dir_path: str | os.PathLike[str], adata: AnnData | None, *, share: bool
) -> Encoder:
    """Do what :meth:`scforge.models.Encoder.load_adapter` says."""
    folder = Path(dir_path)
    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        raise MissingFileError(
            f"dir_path={str(dir_path)!r} holds no adapter; give the folder that save_adapter() wrote."
        )
    try:
        content: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tuning = Tuning.from_json(dict(content["tuning"]), source=str(dir_path))
        assert tuning is not None
        n_epochs, history, vocab = content["n_epochs"], content["history"], content["vocab"]
        seed, checksum = content["seed"], content["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{str(folder / _CONFIG)!r} is not the description of an adapter: {error}.") from error
    if content.get("format", 0) > _FORMAT:
        raise ModelFileError(f"the adapter {str(dir_path)!r} is of a later scforge; update scforge.")
    if sha256_of(folder / _WEIGHTS) != checksum:
        raise ModelFileError(f"{str(folder / _WEIGHTS)!r} is corrupted: its checksum is another one; copy it again.")
    encoder = merged(base.backbone)
    if vocab != base.vocab.hash or digest_of(encoder) != tuning.base["sha256"]:
        raise ModelFileError(
            f"the adapter {str(dir_path)!r} was trained on another base model (other weights or genes); load that one."
        )
    try:
        weights = load_file(folder / _WEIGHTS)
    except SafetensorError as error:
        raise ModelFileError(f"{str(folder / _WEIGHTS)!r} is not a safetensors file: {error}.") from error
    adata = base.adata if adata is None else cls._set_up_as(adata, base._setup)
    if adata is not None and cls._setup_of(adata) is None:
        adata = set_up(
            base, adata, base._setup, tuning.task_options.get("labels_key"), tuning.task_options.get("batch_key")
        )
    registry = bare_registry(cls.__name__, dict(base._setup)) if adata is None else None
    parts = replace(base.spec, tuning=None).to_json()
    model: Encoder = cls._of_parts(parts, base.vocab, adata=adata, registry=registry, seed=seed, tuning=tuning)
    # The same memory, but parameters of their own, which can be frozen, or put on another device.
    shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in encoder.parameters()} if share else {}
    model.module = tuning.build_module(copy.deepcopy(encoder, shared))
    own = model.module.state_dict()
    wanted = {name for name in own if name.startswith("head.") or is_adapter(name)}
    if wanted != set(weights) or any(own[name].shape != value.shape for name, value in weights.items()):
        raise ModelFileError(f"the weights in {str(dir_path)!r} do not fit their description; copy the folder again.")
    model.module.load_state_dict(weights, strict=False)
    model.module.to(torch.device(base.device)).eval()
    model.is_trained_, model.n_epochs_, model._base = True, n_epochs, base
    model._seen = SeenCells.load(folder, tuning.split.get("cells"))
    model._extend_history(history)
    return model
