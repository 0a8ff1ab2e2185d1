"""The folder of a byte-level language model (with ``weights.safetensors``, as in soma-models), and devices."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field

from scforge._io import marked, parsed, read_json, read_settled, sha256_of, sha256_of_json
from scforge._version import __version__
from scforge.data.memory import available_memory
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line
from scforge.models._utils import bounded
from scforge.models.registry import check_layers
from scforge.soma.v1 import ARCHITECTURE_VERSION
from scforge.soma.v1.configs import ModelConfig
from scforge.soma.v1.torch import Model

WEIGHTS, CONFIG, README = "weights.safetensors", "config.json", "README.md"
FINAL = "final"
"""Name of the trained model in a run folder."""

_FORMAT = 1


def write_model(folder: Path, model: Model, *, seq_len: int, facts: Mapping[str, Any]) -> None:
    """Write a model into a new folder; `facts` contains JSON-safe facts about its training."""
    model.save(folder / WEIGHTS)
    (folder / README).write_text(marked(_card(model, seq_len, facts)), encoding="utf-8")
    content = {
        "format": _FORMAT,
        "scforge_version": __version__,
        "architecture_version": ARCHITECTURE_VERSION,
        "model": dataclasses.asdict(model.config),
        "seq_len": seq_len,
        "training": dict(facts),
    }
    content["sha256"] = {WEIGHTS: sha256_of(folder / WEIGHTS), CONFIG: sha256_of_json(content, sort_keys=True)}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_model(folder: str | os.PathLike[str]) -> tuple[Model, int]:
    """Return the model in a folder, or in the folder of a training run, and its sequence length.

    Raises
    ------
    OptionError
        If `folder` is not a path.
    MissingFileError
        If there is no model.
    ModelFileError
        If a file is corrupted, or weights and configuration do not match.
    """
    if not isinstance(folder, str | os.PathLike):
        raise OptionError(f"is of type {type(folder).__name__}; pass the folder of a training run.", argument="model")
    path = Path(folder)
    if not (path / CONFIG).is_file() and (path / FINAL / CONFIG).is_file():
        path /= FINAL
    if missing := [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]:
        raise MissingFileError(f"is not a byte-level language model: {missing[0]} is missing.", model=str(path))
    return read_settled(path, _read)


class _Description(BaseModel):
    """Content of a configuration, with checksums of the weights and of the remaining content."""

    format: int
    scforge_version: str
    architecture_version: int
    model: ModelConfig
    seq_len: int = Field(ge=2)
    sha256: dict[str, str]


def _read(path: Path) -> tuple[Model, int]:
    where = str(path / CONFIG)
    content = read_json(path / CONFIG)
    description = parsed(_Description, content, f"{where!r} is not a configuration of a byte-level language model")
    if (description.format, description.architecture_version) != (_FORMAT, ARCHITECTURE_VERSION):
        raise ModelFileError(
            f"{where!r} was written by another version of scforge; load the model with "
            f"scforge {description.scforge_version}."
        )
    del content["sha256"]
    for name, checksum in ((CONFIG, sha256_of_json(content, sort_keys=True)), (WEIGHTS, sha256_of(path / WEIGHTS))):
        if description.sha256.get(name) != checksum:
            raise ModelFileError(f"{str(path / name)!r} is corrupted: its checksum is wrong; copy the folder again.")
    check_layers(dataclasses.asdict(description.model))
    with bounded(available_memory()):
        return Model.load(path / WEIGHTS, description.model).eval(), description.seq_len


def _card(model: Model, seq_len: int, facts: Mapping[str, Any]) -> str:
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    sizes = "\n".join(f"- {name}: {value}" for name, value in dataclasses.asdict(model.config).items())
    lines = "\n".join(f"- {name.replace('_', ' ')}: {_shown(value)}" for name, value in facts.items())
    return f"""# A byte-level language model

A causal transformer over bytes ({n_weights:,} weights, sequences of {seq_len} tokens), made by scforge {__version__}.

```python
import scforge

scforge.soma.embed(["proteins.fasta"], "this/folder")
```

`{WEIGHTS}` is in the layout of soma-models:

```python
from scforge.soma.v1.torch import Model, ModelConfig

config = {model.config}
model = Model.load("{WEIGHTS}", config)
```

## Sizes

{sizes}

## Training

{lines}
"""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"


def device_of(device: str) -> torch.device:
    """Return a device by name. Raises an error if it does not exist; ``"auto"`` is a GPU if available.

    Examples
    --------
    >>> device_of("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        number = torch.zeros((), device=torch.device(device))
        number.item()  # "meta" contains none
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts it
        raise OptionError(f"cannot be used ({first_line(error)}); pass 'auto' or 'cpu'.", device=device) from error
    return number.device
