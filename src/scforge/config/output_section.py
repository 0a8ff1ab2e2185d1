"""The sections ``output`` and ``eval`` of a configuration file: what is written, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from scforge.config._fields import Int, Path, Positive, Section, Text

__all__ = ["EvalConfig", "OutputConfig"]


def _benchmarks(value: Any) -> Any:
    if value is None:
        return None
    benchmarks = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(benchmarks, list):
        raise ValueError("is not a list of benchmarks")
    for benchmark in benchmarks:
        named = isinstance(benchmark, Mapping) and len(benchmark) == 1 and _is_named(*next(iter(benchmark.items())))
        if not named and not (isinstance(benchmark, str) and benchmark):
            raise ValueError(
                "holds something that is no benchmark; give each as its name, or as its name with options below, "
                "e.g. [cell_type_annotation: {dataset: held_out}]"
            )
    return benchmarks


def _is_named(name: Any, options: Any) -> bool:
    keys_are_text = options is None or (isinstance(options, Mapping) and all(isinstance(key, str) for key in options))
    return isinstance(name, str) and bool(name) and keys_are_text


_BENCHMARK = {"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]}
Benchmarks = Annotated[
    Any,
    BeforeValidator(_benchmarks),
    WithJsonSchema({"anyOf": [{"type": "array", "items": _BENCHMARK}, *_BENCHMARK["anyOf"], {"type": "null"}]}),
]


class OutputConfig(Section):
    """What is written, and where; None writes nothing.

    Parameters
    ----------
    log_dir
        Folder of the training log.
    loggers
        What keeps the log: ``"csv"``, ``"tensorboard"``, ``"wandb"``, one or a list. None takes ``"csv"`` where there
        is a `log_dir`.
    project
        Project of Weights & Biases that the run belongs to.
    run_name
        Name of the run in TensorBoard and in Weights & Biases.
    wandb_mode
        ``"online"``; ``"offline"``, which keeps the log in `log_dir` to be sent later; or ``"disabled"``.
    checkpoint_dir
        Folder of checkpoints and of the trained model. Where neither it nor `embedding` is set, ``scforge train`` takes
        ``checkpoints/NAME`` of a file ``NAME.yaml``, and ``scforge finetune`` ``DATA_TASK``.
    save_top_k
        Epochs to keep as models, those with the lowest validation loss; -1 keeps all.
    keep_last
        States to keep that a run can be resumed from, the latest ones.
    embedding
        h5ad file to write with the data and ``obsm["X_scforge"]``.

    Examples
    --------
    >>> config = OutputConfig(log_dir="logs", loggers="tensorboard", checkpoint_dir="checkpoints")
    >>> config.loggers, config.save_top_k
    (['tensorboard'], 1)
    """

    log_dir: Path | None = None
    loggers: list[Literal["csv", "tensorboard", "wandb"]] | None = None
    project: Text | None = None
    run_name: Text | None = None
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    checkpoint_dir: Path | None = None
    save_top_k: Annotated[Int, Field(ge=-1)] = 1
    keep_last: Positive = 1
    embedding: Path | None = None

    @field_validator("loggers", mode="before")
    @classmethod
    def _one_logger(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("loggers")
    @classmethod
    def _needs_folder(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if value and info.data.get("log_dir", "") is None:
            raise ValueError("has no use without output.log_dir, the folder of the log; add it beside")
        return value

    @field_validator("project", "run_name", "wandb_mode")
    @classmethod
    def _needs_logger(cls, value: str | None, info: ValidationInfo) -> str | None:
        takers = ["wandb", "tensorboard"] if info.field_name == "run_name" else ["wandb"]
        loggers = info.data.get("loggers", takers) or []
        if value is not None and not set(takers) & set(loggers):
            raise ValueError(f"has no use without a logger that takes it; add {takers[0]!r} to output.loggers")
        return value

    @field_validator("embedding")
    @classmethod
    def _h5ad(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".h5ad"):
            raise ValueError("is not the name of an h5ad file; let it end in '.h5ad'")
        return value


class EvalConfig(Section):
    """Benchmarks that are run on the held-out cells while training goes on; their figures stand beside the loss.

    Parameters
    ----------
    benchmarks
        Registered names, or names with options: ``[cell_type_annotation: {labels_key: cell_type}]``. The option
        ``dataset`` names one of `datasets`, whose cells take the place of the held-out ones.
    every_n_epochs
        Epochs from one evaluation to the next; the last epoch is always evaluated.
    datasets
        Name of a data set to its h5ad file.

    Examples
    --------
    >>> config = EvalConfig(benchmarks={"cell_type_annotation": {"labels_key": "cell_type"}}, every_n_epochs=5)
    >>> config.benchmarks
    [{'cell_type_annotation': {'labels_key': 'cell_type'}}]
    """

    benchmarks: Benchmarks = None
    every_n_epochs: Positive = 1
    datasets: dict[Text, Path] = Field(default_factory=dict)

    @field_validator("every_n_epochs", "datasets")
    @classmethod
    def _needs_benchmarks(cls, value: Any, info: ValidationInfo) -> Any:
        # An empty list is a way to switch off what a file asks for.
        if info.data.get("benchmarks", "") is None:
            raise ValueError("has no use without eval.benchmarks; add them beside, e.g. [cell_type_annotation]")
        return value
