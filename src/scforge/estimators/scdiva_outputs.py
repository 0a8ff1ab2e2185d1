"""What the heads of ScDiVa make of cells: posteriors, labels, expression.

Shapes: B cells of a batch, N cells, L latent dimensions, T classes, G genes of the vocabulary.
"""

from __future__ import annotations

import inspect
import math
import numbers as numeric
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from scforge._constants import TARGET_SUM
from scforge.errors import OptionError, did_you_mean, listing
from scforge.finetuning.base import Predictor
from scforge.finetuning.tasks.annotation import Annotation
from scforge.models.protocol import ModelOutput
from scforge.training.predict import run_over

if TYPE_CHECKING:
    from scforge.data.cells import Cells
    from scforge.estimators.base import CellModel
    from scforge.training.objectives.base import Objective


_LEFT_OUT = ("self", "predictor", "adata", "key_added")
_FOLLOWS = "adaptation"
"""The one task that trains a model on by what it was pretrained for, all heads included."""


def check_variational(model: CellModel) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless the variances of a model were trained."""
    aim = model.spec.build_pretraining()
    if not model.spec.model_options["variational"]:
        raise OptionError("return_dist=True but the model was made with variational=False; make one without it.")
    if not hasattr(aim, "beta"):
        raise OptionError(
            f"return_dist=True but the objective {model.spec.objective!r} trains no variances; make the model for "
            "'variational'."
        )
    if not trains_latent(model):
        raise OptionError(
            f"return_dist=True but {model.spec.objective!r} with reconstruction_weight=0 trains no latent; make the "
            "model with a higher one."
        )
    _check_follows(model, "return_dist=True")


def trains_latent(model: CellModel) -> bool:
    """Return whether what the model was made for trains its latent: masked diffusion only as it reconstructs."""
    aim = model.spec.build_pretraining()
    return bool(getattr(aim, "reconstruction_weight", 1.0)) or not getattr(aim, "denoises_values", False)


def check_decodes(model: CellModel) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless the decoder of a model was trained."""
    if not getattr(model.spec.build_pretraining(), "reconstruction_weight", 0.0):
        raise OptionError(
            f"the decoder of the model was not trained by the objective {model.spec.objective!r} with these options; "
            "make the model for 'variational' with a reconstruction_weight."
        )
    _check_follows(model, "predicted expression")


def _check_follows(model: CellModel, what: str) -> None:
    tuning = model.spec.tuning
    if tuning is not None and tuning.task != _FOLLOWS:
        raise OptionError(
            f"{what}: the model was fine-tuned for {tuning.task!r}, which its decoder and its variances have not "
            "followed; call the model that it was made of."
        )


def posterior(model: CellModel, cells: Cells, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return means and variances of the posterior of each cell, float32, each of shape (N, L)."""

    def compute(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = _module(model).infer(**batch)
        return torch.cat([found["mu"].float(), found["logvar"].float().exp()], dim=1)

    both = _run(model, cells, compute, batch_size)
    n_latent = both.shape[1] // 2
    return np.ascontiguousarray(both[:, :n_latent]), np.ascontiguousarray(both[:, n_latent:])


def decoded(
    model: CellModel,
    cells: Cells,
    genes: np.ndarray,
    batches: np.ndarray | None,
    *,
    library_size: float | str,
    batch_size: int,
) -> np.ndarray:
    """Return the expression that the decoder makes of the mean of each cell, float32, shape (N, number of genes).

    Parameters
    ----------
    model, cells, batch_size
        The model over the cells.
    genes
        Genes to return, index among those of the vocabulary.
    batches
        Numbers of the batches to average over; None for all that the model knows.
    library_size
        ``"log1p"``, or the number of counts that counts are given per.
    """
    scale = _scale_of(library_size)
    columns = torch.from_numpy(np.asarray(genes, dtype=np.int64)).to(model.device)

    def compute(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        module = _module(model)
        latent = module.infer(**batch)["mu"]
        if batches is None:
            values = module.decode(latent)
        else:
            each = [
                module.decode(latent, torch.full((len(latent),), int(number), device=latent.device))
                for number in batches
            ]
            values = torch.stack(each).mean(dim=0)
        values = values.float()[:, columns].clamp(min=0)
        return values if scale is None else values.expm1() * scale

    return _run(model, cells, compute, batch_size)


def batch_numbers(objective: Objective, transform_batch: str | Sequence[str] | None) -> np.ndarray | None:
    """Return the numbers of named batches, int64; None for no name.

    Raises
    ------
    OptionError
        If the model knows no batches, or not one of these.
    """
    if transform_batch is None:
        return None
    known = getattr(objective, "batches", None)
    if "batches" not in objective.option_names():
        raise OptionError(
            f"transform_batch={transform_batch!r} but {type(objective).__name__} learns no batches; make the model for "
            "'variational'."
        )
    if not known:
        raise OptionError(
            f"transform_batch={transform_batch!r} but the model knows no batches; call setup_anndata(adata, "
            'batch_key="...") before it is made.'
        )
    names = [transform_batch] if pd.api.types.is_scalar(transform_batch) else list(transform_batch)
    place = {name: number for number, name in enumerate(known)}
    if not names:
        raise OptionError(f"transform_batch={transform_batch!r} names no batch; name one, or None for all.")
    for name in names:
        if str(name) not in place:
            raise OptionError(
                f"transform_batch={name!r} is no batch of the model{did_you_mean(str(name), known)} (known: "
                f"{listing(known)})"
            )
    return np.array([place[str(name)] for name in names], dtype=np.int64)


def labels_task(objective: Objective) -> Annotation | None:
    """Return the task of the labels that a pretraining learned; None if it learned none."""
    key, classes = getattr(objective, "labels_key", None), getattr(objective, "labels", None)
    if key is None or not classes or not getattr(objective, "classification_weight", 0.0):
        return None
    return Annotation(labels_key=key, classes=classes)


def prediction_options(task: Any) -> list[str]:
    """Return the names of the options of the ``predict`` of a task."""
    return [name for name in inspect.signature(task.predict).parameters if name not in _LEFT_OUT]


def predictor_of_labels(model: CellModel, cells: Cells, batch_size: int) -> Predictor:
    """Return the annotation head of the architecture over cells, as tasks take it."""
    classifier = _Classifier(_module(model))
    return Predictor(classifier, model.tokenizer, model.spec.build_pretraining(), cells, batch_size)


class _Uncalibrated(nn.Module):
    """What stands for the head of a fine-tuned model: nothing was calibrated."""

    temperature: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.0))


class _Classifier(nn.Module):
    """An architecture with its own annotation head, in the shape of a fine-tuned module."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = _Uncalibrated()

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **batch: Any) -> torch.Tensor:
        """Return the means of the cells, shape (B, L)."""
        return self.encoder.encode(input_ids=input_ids, attention_mask=attention_mask, **batch)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **batch: Any) -> ModelOutput:
        """Return logits of the classes, shape (B, T), and means, shape (B, L)."""
        latent = self.encode(input_ids, attention_mask, **batch)
        return ModelOutput(logits=self.encoder.classify(latent), embeddings=latent)


def _run(model: CellModel, cells: Cells, compute: Any, batch_size: int) -> np.ndarray:
    objective = model.spec.build_objective()
    return run_over(_module(model), cells, model.tokenizer, compute, objective=objective, batch_size=batch_size)


def _module(model: CellModel) -> Any:
    return model.backbone


def _scale_of(library_size: float | str) -> float | None:
    if library_size == "log1p":
        return None
    is_number = isinstance(library_size, numeric.Real) and not isinstance(library_size, bool)
    if not is_number or not math.isfinite(float(library_size)) or float(library_size) <= 0:
        raise OptionError(f"library_size={library_size!r} is neither 'log1p' nor a positive number; give e.g. 1e4.")
    return float(library_size) / TARGET_SUM
