"""Regression: one number per cell, such as age, pseudotime or dose.

Shapes: B cells of a batch, N cells, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from anndata import AnnData
from torch import nn

from scforge._checks import check_choice, check_positive
from scforge.data.cells import cell_names
from scforge.errors import DataError, OptionError
from scforge.eval.baselines import BaselineInputs, regression_baselines
from scforge.finetuning.base import Batch, Column, Loss, Predictor, register_task
from scforge.finetuning.heads import PredictionHead, fit_ridge
from scforge.finetuning.metrics import regression_figures
from scforge.finetuning.supervised import SupervisedTask

_LOSSES: dict[str, Callable[..., torch.Tensor]] = {"huber": F.huber_loss, "mse": F.mse_loss}

_NUMBERS = ("integer", "floating", "mixed-integer-float")
"""Contents of a column of Python objects that are numbers."""


@register_task("regression")
class Regression(SupervisedTask):
    """Distance between the prediction and a number for each cell.

    Cells without a target value (NaN) are not used for training.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the target values.
    loss_function
        ``"huber"`` (quadratic up to one standard deviation of the training cells, linear beyond, so that outliers have
        less weight) or ``"mse"``.
    center, scale
        Mean and standard deviation used to standardize the numbers. If None, computes them from the training cells.
    head
        Head options, a dict with ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Whether to initialize the last layer of the head from a ridge regression on the embeddings of the training
        cells.
    """

    monitor = "rmse"
    lower_is_better = frozenset({"mae", "rmse"})
    labels_key: str

    def __init__(
        self,
        *,
        labels_key: str,
        loss_function: str = "huber",
        center: float | None = None,
        scale: float | None = None,
        head: Mapping[str, Any] | None = None,
        probe_first: bool = True,
    ) -> None:
        super().__init__(head, probe_first)
        self.labels_key = labels_key
        self.loss_function = check_choice("loss_function", loss_function, _LOSSES)
        if (center is None) != (scale is None):
            raise OptionError(f"and scale={scale!r} must be given together; pass both, or neither.", center=center)
        if isinstance(center, str) or isinstance(scale, str):
            raise OptionError(f"and scale={scale!r} must be numbers.", center=center)
        self.center: Any = None if center is None else float(center)
        self.scale: Any = None if scale is None else check_positive("scale", scale)

    def usable(self, column: Column) -> np.ndarray:
        """Return which cells have a number."""
        return self.has_target(self.read(column))

    def options_from(self, column: Column) -> dict[str, Any]:
        """Return the mean and standard deviation of the column over the training cells, unless they are given.

        Raises
        ------
        DataError
            If the column does not contain numbers, or contains only one value.
        """
        values = self.read(column)
        values = values[~np.isnan(values)]
        if not len(values) or np.ptp(values) == 0:
            what = f"only one value ({values[0]:g})" if len(values) else "no values"
            problem = f"has {what} among the training cells; regression needs at least two different values."
            raise DataError(problem, **self.targets_option)
        return {} if self.center is not None else {"center": float(values.mean()), "scale": float(values.std())}

    def read(self, column: Column) -> np.ndarray:
        """Return the numbers in a column, float64, shape (N,); NaN for missing values.

        Raises
        ------
        DataError
            If the column contains booleans, text or infinite values.
        """
        values = column(self.labels_key)
        if values.dtype == object and pd.api.types.infer_dtype(values, skipna=True) in _NUMBERS:
            values = pd.to_numeric(values)
        kinds = values.cat.categories if isinstance(values.dtype, pd.CategoricalDtype) else values
        if pd.api.types.is_bool_dtype(kinds) or not pd.api.types.is_numeric_dtype(kinds):
            first = next(iter(values.dropna()), None)
            raise DataError(
                f"does not contain numbers (first: {first!r}); use the task 'annotation' for classes.",
                **self.targets_option,
            )
        numbers = np.asarray(values.astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan))
        if np.isinf(numbers).any():
            raise DataError("contains infinite values; replace them with numpy.nan.", **self.targets_option)
        return numbers

    def has_target(self, targets: np.ndarray) -> np.ndarray:
        """Return which cells have a number."""
        return ~np.isnan(targets)

    def make_head(self, n_latent: int, module: nn.Module) -> PredictionHead:
        """Create the head, whose single output is the standardized number."""
        return PredictionHead(n_latent, 1, **self.head)

    def _standardized(self, values: np.ndarray) -> np.ndarray:
        return (values - self.center) / self.scale

    def fit(self, features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fit a ridge regression."""
        return fit_ridge(features, self._standardized(targets))

    def targets(self, rows: np.ndarray) -> Batch:
        """Return the standardized value of each cell, or NaN if it is missing."""
        return {"target": torch.from_numpy(self._standardized(self._targets[rows]).astype(np.float32))}

    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Return the mean loss over the cells that have a number, and the sums from which scores are computed."""
        predicted, target = outputs[:, 0].float(), batch["target"]
        labeled = ~torch.isnan(target)
        # Without a number the prediction is right. Leaving these cells out would wait for a GPU.
        filled = torch.where(labeled, target, predicted.detach())
        summed = _LOSSES[self.loss_function](predicted, filled, reduction="sum")
        error, number = (predicted - filled).detach(), target.nan_to_num(0.0)
        # Of the cells of the batch: share with a number, absolute and squared errors, numbers and their squares.
        moments = torch.stack([labeled.float(), error.abs(), error.square(), number, number.square()]).mean(dim=1)
        return summed / labeled.sum().clamp_min(1), {"moments": moments}

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss, MAE and RMSE in units of the column, and R2."""
        n, absolute, squared, target, target_squared = means["moments"]
        if not n or self.scale is None:
            return {"loss": float(means["loss"]), **dict.fromkeys(("mae", "rmse", "r2"), float("nan"))}
        variance = target_squared / n - (target / n) ** 2
        return {
            "loss": float(means["loss"]),
            "mae": float(absolute / n * self.scale),
            "rmse": float(np.sqrt(squared / n) * self.scale),
            "r2": float(1 - squared / n / variance) if variance > 0 else float("nan"),
        }

    def estimate(self, predictor: Predictor, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the number of each cell, in the units of the column, float64, shape (N,)."""
        return predictor.outputs(rows)[:, 0].astype(np.float64) * self.scale + self.center

    def predict(  # type: ignore[override]
        self, predictor: Predictor, adata: AnnData | None, *, key_added: str | None = None
    ) -> pd.DataFrame:
        """Predict the number of each cell, in the units of the column.

        Parameters
        ----------
        predictor, adata
            The model applied to the cells, and the AnnData to write to, or None.
        key_added
            Column of ``adata.obs`` to write (float32) instead of ``"scforge_<labels_key>"``.

        Returns
        -------
        A table with the column ``prediction``, float32.
        """
        values = self.estimate(predictor).astype(np.float32)
        if adata is not None:
            adata.obs[key_added or f"scforge_{self.labels_key}"] = values
        return pd.DataFrame({"prediction": values}, index=cell_names(predictor.cells))

    def baselines(self, inputs: BaselineInputs, targets: np.ndarray) -> dict[str, np.ndarray]:
        """Return the estimates of :func:`scforge.eval.baselines.regression_baselines`."""
        return regression_baselines(inputs, targets)

    def scores(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, float]:
        """Return MAE and RMSE (in units of the column), R2, and the Pearson and Spearman correlations."""
        return regression_figures(truth, estimates)
