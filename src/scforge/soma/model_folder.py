"""The folder of a model of bytes: ``weights.safetensors`` (as soma-models reads it), ``config.json``, ``README.md``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scforge._checks import check_count
from scforge._io import read_json, read_settled, sha256_of
from scforge._version import __version__
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line, warn
from scforge.soma.v1 import ARCHITECTURE_VERSION
from scforge.soma.v1.configs import ModelConfig, check_config
from scforge.soma.v1.torch import Model

WEIGHTS, CONFIG, README = "weights.safetensors", "config.json", "README.md"
FINAL = "final"
"""Name of the trained model in the folder of a training."""

_FORMAT = 1


def write_model(folder: Path, model: Model, *, seq_len: int, facts: Mapping[str, Any]) -> None:
    """Write a model into a folder that is being made; `facts` about its training are JSON-safe."""
    model.save(folder / WEIGHTS)
    content = {
        "format": _FORMAT,
        "scforge_version": __version__,
        "architecture_version": ARCHITECTURE_VERSION,
        "model": dataclasses.asdict(model.config),
        "seq_len": seq_len,
        "training": dict(facts),
    }
    content["sha256"] = {WEIGHTS: sha256_of(folder / WEIGHTS), CONFIG: _sum(content)}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / README).write_text(_card(model, seq_len, facts), encoding="utf-8")


def read_model(folder: str | os.PathLike[str], *, argument: str = "model") -> tuple[Model, int]:
    """Return the model in a folder, or in the folder of a training, and the length of its sequences.

    Raises
    ------
    OptionError
        If `folder` is no name of a folder.
    MissingFileError
        If there is none.
    ModelFileError
        If a file is damaged, or weights and configuration do not fit.
    """
    if not isinstance(folder, str | os.PathLike):
        raise OptionError(f"{argument} is of type {type(folder).__name__}; give the name of the folder of a training.")
    path = Path(folder)
    if not (path / CONFIG).is_file() and (path / FINAL / CONFIG).is_file():
        path /= FINAL
    if not (path / CONFIG).is_file():
        raise MissingFileError(f"{argument}={str(path)!r} holds no model of bytes; train one with scforge soma train.")
    return read_settled(path, lambda: _read(path))


def _read(path: Path) -> tuple[Model, int]:
    where = str(path / CONFIG)
    try:
        content = read_json(path / CONFIG)
        if content["format"] != _FORMAT or content["architecture_version"] != ARCHITECTURE_VERSION:
            raise ModelFileError(f"{where!r} is of a later version; load it with scforge {content['scforge_version']}.")
        _check_sums(path, content.pop("sha256", None), content)
        config, seq_len = ModelConfig(**content["model"]), content["seq_len"]
        check_count("seq_len", seq_len, "tokens", least=2)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{where!r} is no configuration of a model of bytes: {first_line(error)}.") from error
    weights = path / WEIGHTS
    try:
        check_config(config)
        # Each weight takes a byte at least; memory is taken for no model that is larger than its file.
        per_layer = config.embedding_dim + config.pwff_hidden_dim
        n_weights = config.embedding_dim * (config.vocab_size + config.num_layers * per_layer)
        if weights.is_file() and n_weights > weights.stat().st_size:
            raise OptionError(f"{WEIGHTS} is too small for its sizes")
        return Model.load(weights, config).eval(), seq_len
    except OptionError as error:
        raise ModelFileError(f"{where!r} describes no model that can be made: {first_line(error)}.") from error


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_sums(folder: Path, sums: Mapping[str, str] | None, content: Mapping[str, Any]) -> None:
    """Raise if a file is not what was written; the first folders had no checksums."""
    if not (folder / WEIGHTS).is_file():
        return
    if sums is None:
        warn(f"{str(folder)!r} has no checksums, so damage to its weights may go unseen; save it again.")
        return
    for name, found in ((CONFIG, _sum(content)), (WEIGHTS, sha256_of(folder / WEIGHTS))):
        if sums[name] != found:
            raise ModelFileError(
                f"{str(folder / name)!r} is corrupted: its checksum is not the one in {CONFIG}; copy the folder again."
            )


def _card(model: Model, seq_len: int, facts: Mapping[str, Any]) -> str:
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    sizes = "\n".join(f"- {name}: {value}" for name, value in dataclasses.asdict(model.config).items())
    told = "\n".join(f"- {name.replace('_', ' ')}: {_shown(value)}" for name, value in facts.items())
    return f"""# A model of bytes

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

{told}
"""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"
