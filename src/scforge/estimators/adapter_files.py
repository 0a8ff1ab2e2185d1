"""Adapters and heads without the model that they sit on."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from scforge._io import atomic_folder, check_inside, read_settled, sha256_of
from scforge.errors import MissingFileError, ModelFileError, OptionError, listing
from scforge.estimators.card_facts import CardFacts, base_of, facts_of
from scforge.estimators.finetuning_run import set_up
from scforge.estimators.folder_formats import ADAPTER, lacking, read_description, sealed
from scforge.estimators.registries import bare_registry
from scforge.estimators.shape_check import check_adapter
from scforge.finetuning.adapters import adapters_disabled, digest_of, has_lora, is_adapter, merge_lora, merged
from scforge.finetuning.held_out import SeenCells
from scforge.models._weights import read_shapes, read_weights, refuse_not_finite, refuse_pickle

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.estimators.encoder import Encoder

__all__ = ["AdapterMethods", "load_adapter", "save_adapter"]

_CONFIG, _WEIGHTS, _SPLIT = "adapter.json", "adapter.safetensors", "split.safetensors"
_CONTENT = {"tuning": dict, "vocab": str, "seed": int, "n_epochs": int, "history": dict, "sha256": str}
"""What loading reads of the description, and its type."""


class AdapterMethods:
    """Methods around adapters."""

    def save_adapter(self: Any, dir_path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save what fine-tuning with ``lora`` has learned: the adapters and the head, 0.2 to 0.4 MB of a light encoder.

        Parameters
        ----------
        dir_path
            Folder to make. It appears whole or not at all.
        overwrite
            Replace the model in a folder that exists; files that are not of scforge stay.

        Raises
        ------
        OptionError
            If the model has no adapters.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> annotator.save_adapter("blood_adapter", overwrite=True)
        >>> again = scforge.models.Encoder.load_adapter(model, "blood_adapter", adata)
        >>> again.predict()["label"].equals(annotator.predict()["label"])
        True
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

        Returns
        -------
        The fine-tuned model.

        Raises
        ------
        MissingFileError, ModelFileError
            If the folder cannot be used, or was made with another base.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> annotator.save_adapter("blood_adapter", overwrite=True)
        >>> again = scforge.models.Encoder.load_adapter(model, "blood_adapter", adata)
        >>> again.spec.tuning.task
        'annotation'
        """
        return read_settled(dir_path, lambda: load_adapter(cls, base, dir_path, adata, share=share))

    def merge_adapter(self: Any) -> None:
        """Add the adapters to the weights: the same predictions, at the cost of a model without adapters.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> before = annotator.predict()["label"]
        >>> annotator.merge_adapter()
        >>> annotator.predict()["label"].equals(before)
        True
        """
        self._task("merge_adapter")
        if not has_lora(self.backbone):
            raise OptionError("the model has no adapters to merge; fine-tune with lora=True.")
        merge_lora(self.backbone)
        self.backbone.requires_grad_(True)
        self._spec = replace(self._spec, tuning=replace(self._spec.tuning, lora=None))

    @contextmanager
    def adapter_disabled(self: Any) -> Iterator[None]:
        """Compute as before fine-tuning, without the adapters, e.g. ``with annotator.adapter_disabled(): ...``.

        Yields
        ------
        Nothing; the adapters are back when the block ends.

        Raises
        ------
        OptionError
            If the model has no adapters.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> with annotator.adapter_disabled():
        ...     before = annotator.get_latent_representation()
        >>> bool((before == model.get_latent_representation()).all())
        True
        """
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
            "architecture": model.spec.architecture,
            "vocab": model.vocab.hash,
            "tuning": tuning.to_json(),
            "seed": model.seed,
            "n_epochs": model.n_epochs_,
            "history": {name: frame[name].tolist() for name, frame in model.history_.items()},
            "sha256": sha256_of(folder / _WEIGHTS),
            "base": base_of(model, Path(dir_path)),
            "card": replace(facts_of(model), base=None).to_json(),
        }
        (folder / _CONFIG).write_text(sealed(ADAPTER, content), encoding="utf-8")


def load_adapter(
    cls: Any, base: Encoder, dir_path: str | os.PathLike[str], adata: AnnData | None, *, share: bool
) -> Encoder:
    """Do what :meth:`scforge.models.Encoder.load_adapter` says."""
    cls = type(base) if issubclass(type(base), cls) else cls
    folder = Path(dir_path)
    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        raise MissingFileError(
            f"dir_path={str(dir_path)!r} holds no adapter; give the folder that save_adapter() wrote."
        )
    for name in (_CONFIG, _WEIGHTS, _SPLIT):
        check_inside(folder, name)
    refuse_pickle(folder / _WEIGHTS)
    content = read_description(ADAPTER, folder / _CONFIG)
    if wrong := lacking(content, _CONTENT):
        raise ModelFileError(f"{str(folder / _CONFIG)!r} lacks {listing(wrong)}; copy the adapter again.")
    n_epochs, history, vocab, seed = (content[key] for key in ("n_epochs", "history", "vocab", "seed"))
    shapes = read_shapes(folder / _WEIGHTS)
    if (folder / _SPLIT).is_file():
        read_shapes(folder / _SPLIT)
    if sha256_of(folder / _WEIGHTS) != content["sha256"]:
        raise ModelFileError(f"{str(folder / _WEIGHTS)!r} is corrupted: its checksum is another one; copy it again.")
    encoder = merged(base.backbone)
    said = content["tuning"].get("base")
    of_base = said.get("sha256") if isinstance(said, dict) else None
    if vocab != base.vocab.hash or digest_of(encoder) != of_base:
        raise ModelFileError(
            f"the adapter {str(dir_path)!r} was trained on another base model (other weights or genes); load that one."
        )
    tuning = check_adapter(base.spec, content["tuning"], shapes, n_base=len(encoder.state_dict()), source=str(dir_path))
    weights = read_weights(folder / _WEIGHTS)
    adata = base.adata if adata is None else cls._set_up_as(adata, base._setup)
    if adata is not None and cls._setup_of(adata) is None:
        adata = set_up(
            base, adata, base._setup, tuning.task_options.get("labels_key"), tuning.task_options.get("batch_key")
        )
    registry = bare_registry(cls.__name__, dict(base._setup)) if adata is None else None
    parts = replace(base.spec, tuning=None).to_json()
    # The same memory, but parameters of their own, which can be frozen, or put on another device.
    shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in encoder.parameters()} if share else {}
    on_base = replace(tuning, backbone=copy.deepcopy(encoder, shared))
    model: Encoder = cls._of_parts(parts, base.vocab, adata=adata, registry=registry, seed=seed, tuning=on_base)
    model._spec = replace(model._spec, tuning=tuning)  # another module of this description is a new one
    refuse_not_finite(weights, model.module, source=str(dir_path))
    model.module.load_state_dict(weights, strict=False)
    model.module.to(torch.device(base.device)).eval()
    model.is_trained_, model.n_epochs_, model._base = True, n_epochs, base
    model._seen = SeenCells.load(folder, tuning.split.get("cells"))
    model._extend_history(history)
    model._facts = CardFacts.from_json(content.get("card"), source=str(dir_path))
    return model
