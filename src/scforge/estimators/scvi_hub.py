"""A model folder that ``scvi.hub.HubModel`` works on, too.

scvi-tools reads ``model.pt`` with ``torch.load(weights_only=False)``, which runs whatever code the file brings. What is
written here needs none of that: the file holds plain containers, text and tensors, and loads with
``weights_only=True``. That is how :class:`HubLoader`, which ``_scvi_required_metadata.json`` names as the class of the
model, reads it, and only where the rest of the folder is missing: ``HubModel.pull_from_huggingface_hub`` downloads
``model.pt``, the metadata and ``adata.h5ad`` alone.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scforge.data.sources import read_h5ad
from scforge.errors import ModelFileError, first_line

if TYPE_CHECKING:
    from anndata import AnnData


_MODEL, _METADATA, _ADATA = "model.pt", "_scvi_required_metadata.json", "adata.h5ad"
_VERSIONS = {"scvi_version": "scvi-tools", "anndata_version": "anndata"}
_FILES = ("config.json", "vocab.json", "split.safetensors")


def write_scvi_files(model: Any, folder: Path) -> None:
    """Add ``model.pt`` and ``_scvi_required_metadata.json`` to a folder that holds a model.

    ``model.pt`` has the parts that scvi-tools expects: ``model_state_dict``, ``var_names`` and ``attr_dict`` with
    ``registry_`` and ``init_params_``; and the other files of the folder as bytes.
    """
    versions = {name: version(package) for name, package in _VERSIONS.items()}
    registry = {**_plain(dict(model.registry_)), "scvi_version": versions["scvi_version"]}
    content = {
        "model_state_dict": {name: value.detach().cpu().clone() for name, value in model.module.state_dict().items()},
        "var_names": list(model.vocab.genes),
        "attr_dict": {
            "registry_": registry,
            "init_params_": {"kwargs": {}, "non_kwargs": _plain(model.spec.to_json())},
            "is_trained_": bool(model.is_trained_),
        },
        "scforge_files": {name: _bytes_of(folder / name) for name in _FILES if (folder / name).exists()},
    }
    torch.save(content, folder / _MODEL)
    metadata = {
        **versions,
        "model_cls_name": type(model).__name__,
        "training_data_url": None,
        "model_parent_module": __name__,
    }
    (folder / _METADATA).write_text(json.dumps(metadata, indent=4) + "\n", encoding="utf-8")


class HubLoader:
    """Loads models of one front class for scvi-tools.

    Parameters
    ----------
    name
        Name of the front class in ``scforge.models``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def load(
        self,
        dir_path: str | os.PathLike[str],
        adata: AnnData | None = None,
        accelerator: str = "auto",
        device: int | str = "auto",
    ) -> Any:
        """Load a model, as ``HubModel.load_model`` asks for it.

        Parameters
        ----------
        dir_path
            The folder.
        adata
            Cells; None takes ``adata.h5ad`` of the folder, if it is there.
        accelerator, device
            As in scvi-tools.

        Raises
        ------
        MissingFileError, ModelFileError
            If the folder, or what is in it, cannot be used.
        """
        from scvi.model._utils import parse_device_args

        import scforge

        folder = Path(dir_path)
        if adata is None and (folder / _ADATA).is_file():
            adata = read_h5ad(folder / _ADATA)
        _, _, place = parse_device_args(accelerator, device, return_device="torch", validate_single_device=True)
        cls = getattr(scforge.models, self.name)
        if (folder / "config.json").is_file() or not (folder / _MODEL).is_file():
            return cls.load(folder, adata, device=place)
        with tempfile.TemporaryDirectory() as made:
            _unpack(folder / _MODEL, Path(made))
            return cls.load(made, adata, device=place)


Encoder = HubLoader("Encoder")
"""What the metadata name; the front class itself is :class:`scforge.models.Encoder`."""

ScDiVa = HubLoader("ScDiVa")
"""As `Encoder`, of :class:`scforge.models.ScDiVa`."""


def _unpack(file: Path, folder: Path) -> None:
    """Make a model folder of ``model.pt``; nothing in it is run.

    Raises
    ------
    ModelFileError
        If it holds more than plain containers and tensors, or was not made by scforge.
    """
    from safetensors.torch import save_file

    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        save_file(dict(content["model_state_dict"]), folder / "model.safetensors", metadata={"format": "pt"})
        for name in _FILES:
            if name in content["scforge_files"]:
                (folder / name).write_bytes(content["scforge_files"][name].numpy().tobytes())
    except (pickle.UnpicklingError, RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(
            f"{str(file)!r} is not what save(scvi_format=True) wrote: {first_line(error)}; it was not opened further."
        ) from error


def _bytes_of(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(path.read_bytes(), dtype=np.uint8).copy())


def _plain(value: Any) -> Any:
    """Return nested settings as containers, texts and numbers, which need no code to be read."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
