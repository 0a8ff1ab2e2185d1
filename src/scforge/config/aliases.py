"""Other places where a configuration file may set an option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scforge.config._messages import shown
from scforge.errors import ConfigError

__all__ = ["ALIASES", "AliasError", "apply_aliases"]


class AliasError(ConfigError):
    """Options that cannot stand as they do.

    Parameters
    ----------
    message
        The sentence.
    *options
        Dotted names, as they are spelled where they were set.
    """

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message)
        self.options = options


ALIASES = {
    "data.num_workers": "data.num_threads",
    "data.obs": "data.obs_columns",
    "finetune.data": "data.paths",
    "finetune.gradual_unfreezing": "training.gradual_unfreezing",
    "finetune.layer_lr_decay": "training.layer_lr_decay",
    "finetune.output": "output.checkpoint_dir",
    "finetune.seed": "seed",
    "model.mask_ratio": "tokenizer.masking.mask_ratio",
    "model.pretraining_task": "objective.name",
    "tokenizer.gene_vocab": "data.gene_vocab",
    "tokenizer.max_genes": "data.max_genes",
    "tokenizer.max_len": "data.max_genes",
    "training.lr": "training.optimizer.lr",
    "training.max_tokens_per_batch": "data.max_tokens_per_batch",
    "training.num_gpus": "training.devices",
}
"""Accepted place of an option to the place where the schema has it."""

_ON_GPUS = ("auto", "gpu", "cuda")


def apply_aliases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw` with every aliased option at its canonical place; `raw` is not changed.

    Parameters
    ----------
    raw
        Content of a configuration file, before validation.

    Raises
    ------
    ConfigError
        If an alias and its canonical option have different values.
    """
    content = _copied(raw)
    _move_data(content)
    for alias, canonical in ALIASES.items():
        found, value = _pop(content, alias)
        if not found:
            continue
        if alias == "training.num_gpus":
            _use_gpus(content, value)
        else:
            _put(content, canonical, value, alias=alias)
    return content


def _get(content: Mapping[str, Any], dotted: str) -> tuple[bool, Any]:
    """Return whether `content` has the option, and its value."""
    value: Any = content
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value


def _copied(raw: Mapping[str, Any]) -> dict[str, Any]:
    # Two levels down is as deep as an alias reaches; deeper values are shared, and not changed.
    return {
        name: {key: dict(value) if isinstance(value, Mapping) else value for key, value in section.items()}
        if isinstance(section, Mapping)
        else section
        for name, section in raw.items()
    }


def _pop(content: dict[str, Any], dotted: str) -> tuple[bool, Any]:
    section, key = dotted.split(".")
    holder = content.get(section)
    if not isinstance(holder, dict) or key not in holder:
        return False, None
    return True, holder.pop(key)


def _put(content: dict[str, Any], dotted: str, value: Any, *, alias: str) -> None:
    *sections, key = dotted.split(".")
    holder = content
    for depth, name in enumerate(sections):
        if holder.get(name) is None:
            holder[name] = {}
        holder = holder[name]
        if not isinstance(holder, dict):
            section = ".".join(sections[: depth + 1])
            raise AliasError(f"{section}={shown(holder)} is not a section with options.", section)
    if key in holder and holder[key] != value:
        raise AliasError(
            f"{alias}={shown(value)} and {dotted}={shown(holder[key])} set the same option to different values; "
            f"keep {dotted} alone.",
            alias,
            dotted,
        )
    holder[key] = value


def _move_data(content: dict[str, Any]) -> None:
    """Take a whole section ``finetune.data`` for the section ``data``."""
    found, section = _get(content, "finetune.data")
    if found and isinstance(section, Mapping):
        del content["finetune"]["data"]
        for key, value in section.items():
            _put(content, f"data.{key}", value, alias=f"finetune.data.{key}")


def _use_gpus(content: dict[str, Any], n_gpus: Any) -> None:
    if isinstance(n_gpus, bool) or not isinstance(n_gpus, int) or n_gpus < 0:
        message = f"training.num_gpus={shown(n_gpus)} is not a number of GPUs; give 0 or more."
        raise AliasError(message, "training.num_gpus")
    _, accelerator = _get(content, "training.accelerator")
    if n_gpus == 0:
        _put(content, "training.accelerator", "cpu", alias="training.num_gpus")
        # As many processes as a file had GPUs would be started on the CPU otherwise.
        content["training"].setdefault("devices", 1)
        return
    if accelerator not in (None, *_ON_GPUS):
        raise AliasError(
            f"training.num_gpus={n_gpus} and training.accelerator={shown(accelerator)} contradict each other; "
            "keep one of the two.",
            "training.num_gpus",
            "training.accelerator",
        )
    content["training"]["accelerator"] = "gpu" if accelerator in (None, "auto") else accelerator
    _put(content, "training.devices", n_gpus, alias="training.num_gpus")
