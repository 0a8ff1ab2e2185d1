"""The section ``finetune`` of a configuration file: which trained model is fine-tuned, for what, on which split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from scforge.config._fields import Float, OpenSection, Path, Text

__all__ = ["EVALUATIONS", "TASK_ALIASES", "FinetuneConfig"]

TASK_ALIASES = {
    "batch_integration": "integration",
    "cell_type_annotation": "annotation",
    "perturbation_prediction": "perturbation",
}
"""What a task is also called to the name in the registry."""

EVALUATIONS = {"perturbbench": "perturbation"}
"""What an evaluation is also called to the task whose evaluation it is."""


def _task(value: str) -> str:
    return TASK_ALIASES.get(value, value)


def _freeze(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError("is neither true, false nor a number of layers")


def _lora(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        return value
    raise ValueError("is neither true, false nor a section with options such as {r: 8}")


def _evaluate(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return EVALUATIONS.get(value, value) if isinstance(value, str) else value
    raise ValueError("is neither true, false nor the name of an evaluation")


Freeze = Annotated[
    Any, BeforeValidator(_freeze), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1}]})
]
Lora = Annotated[
    Any, BeforeValidator(_lora), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}], "default": False})
]
Evaluate = Annotated[
    Any, BeforeValidator(_evaluate), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string"}]})
]
Part = Annotated[Float, Field(ge=0, lt=1)]


class FinetuneConfig(OpenSection):
    """Fine-tuning of a trained model for a task. Any other key is an option of the task, e.g. ``class_weights``.

    Architecture, tokenizer and genes are those of the base model; batches, epochs and learning rates stand in
    ``training``, and the cells in ``data``.

    Parameters
    ----------
    base_model
        The model that is fine-tuned: its folder, a repository of the hub (``org/name``), or ``scforge://name``.
    task
        Registered name of the task, e.g. ``"annotation"``.
    labels_key, batch_key
        Columns of ``obs`` that the task is about. None takes those of the section ``data``.
    validation_size, test_size
        Shares of the cells that choose the best epoch, and that the model never sees until it is evaluated.
    split_by
        Column of ``obs`` with groups, e.g. donors, that are held out as a whole. None splits by cell.
    split_key
        Column of ``obs`` that says ``"train"``, ``"validation"`` or ``"test"``, in place of a random split.
    freeze
        True trains the head alone; a number leaves the embeddings and so many layers as they are.
    lora
        True, or options: train low-rank adapters in place of the weights.
    head
        Options of the head: ``hidden_dim`` and ``dropout``.
    evaluate
        Score the cells of ``test_size`` in the end, beside baselines. The name of an evaluation, e.g.
        ``"perturbbench"``, has to be of the task.
    **options
        Options of the task, checked by its constructor.

    Examples
    --------
    >>> FinetuneConfig(base_model="ck/final", task="cell_type_annotation", class_weights="balanced").user_options()
    {'class_weights': 'balanced'}
    """

    _not_options: ClassVar[frozenset[str]] = frozenset(
        {
            *("base_model", "task", "labels_key", "batch_key", "validation_size", "test_size", "split_by", "split_key"),
            *("freeze", "lora", "head", "evaluate"),
        }
    )

    base_model: Path
    task: Annotated[Text, AfterValidator(_task)]
    labels_key: Text | None = None
    batch_key: Text | None = None
    validation_size: Part = 0.1
    test_size: Part = 0.1
    split_by: Text | None = None
    split_key: Text | None = None
    freeze: Freeze = False
    lora: Lora = False
    head: dict[Text, Any] | None = None
    evaluate: Evaluate = False

    @field_validator("test_size")
    @classmethod
    def _leaves_cells(cls, value: float, info: ValidationInfo) -> float:
        validation_size = info.data.get("validation_size", 0.0)
        if value + validation_size >= 1:
            raise ValueError(f"and validation_size={validation_size:g} leave no cell to train on; lower one of them")
        return value

    @field_validator("split_key")
    @classmethod
    def _one_split(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("split_by") is not None:
            raise ValueError(f"has no use beside split_by={info.data['split_by']!r}; keep one of them")
        return value
