"""Regression: one number a cell, such as age, pseudotime or dose.

Shapes: B cells of a batch, N cells, D dimensions.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scforge._checks import check_bool, check_positive
from scforge.errors import DataError, OptionError, TrainingError
from scforge.eval.baselines import regression_baselines
from scforge.finetuning.base import Evaluated, Task, register_task
from scforge.finetuning.baselines import baseline_inputs
from scforge.finetuning.heads import PredictionHead, check_head, fit_ridge, probe
from scforge.finetuning.labels import check_key
from scforge.finetuning.metrics import regression_figures
from scforge.training.objectives.base import TrainingDefaults

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.data.cells import Cells, CellSource
    from scforge.finetuning.base import EvaluationContext, Predictor
    from scforge.finetuning.heads import FineTunedModule
    from scforge.tokenizers.base import Tokenizer


_LOSSES: dict[str, Callable[..., torch.Tensor]] = {"huber": F.huber_loss, "mse": F.mse_loss}


@register_task("regression")
class Regression(Task):
    """Distance of the prediction from a number of each cell.

    Cells without the number (NaN) take no part in training.

    Parameters
    ----------
    labels_key
        Column of obs with the numbers.
    loss_function
        ``"huber"`` (quadratic up to one standard deviation of the training cells, linear beyond, so that outliers
        weigh less) or ``"mse"``.
    center, scale
        Mean and standard deviation of the training cells, by which the numbers are standardized; None finds them.
    head
        Options of the head, a dict of ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Start the last layer of the head at the ridge regression on the embeddings of the training cells.
    """

    defaults = TrainingDefaults(batch_size=64, lr=3e-4, weight_decay=0.01, schedule="cosine_warmup", max_epochs=15)
    monitor = "rmse"

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
        self.labels_key = check_key("labels_key", labels_key)
        if loss_function not in _LOSSES:
            raise OptionError(f"loss_function={loss_function!r} is not known; choose 'huber' or 'mse'.")
        self.loss_function = loss_function
        if (center is None) != (scale is None):
            raise OptionError(f"center={center!r} and scale={scale!r} belong together; give both or none.")
        if center is not None and (not isinstance(center, numbers.Real) or not np.isfinite(float(center))):
            raise OptionError(f"center={center!r} is not a number.")
        if scale is not None:
            check_positive("scale", scale)
        self.center = None if center is None else float(center)
        self.scale = None if scale is None else float(scale)
        self.head = check_head(head)
        self.probe_first = check_bool("probe_first", probe_first)
        self._targets: np.ndarray | None = None

    def usable(self, column: Callable[[str], pd.Series]) -> np.ndarray:
        """Return which cells have a number."""
        return ~np.isnan(self.numbers_of(column(self.labels_key)))

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return mean and standard deviation of the training cells, unless they are given.

        Raises
        ------
        DataError
            If the column does not hold numbers, or one value only.
        """
        values = self.numbers_of(column(self.labels_key))
        values = values[~np.isnan(values)]
        if not len(values) or np.ptp(values) == 0:
            what = f"one value only ({values[0]:g})" if len(values) else "no value"
            raise DataError(
                f"labels_key={self.labels_key!r} has {what} among the training cells; regression needs cells that "
                "differ."
            )
        if self.center is not None:
            return {}
        return {"center": float(values.mean()), "scale": float(values.std())}

    def numbers_of(self, values: pd.Series) -> np.ndarray:
        """Return a column as numbers, float64, NaN where they are missing, shape (N,).

        Raises
        ------
        DataError
            If it holds truth values, text or infinite values.
        """
        import pandas as pd

        kinds = values.cat.categories if isinstance(values.dtype, pd.CategoricalDtype) else values
        if pd.api.types.is_bool_dtype(kinds) or not pd.api.types.is_numeric_dtype(kinds):
            first = next(iter(values.dropna()), None)
            truth = pd.api.types.is_bool_dtype(kinds) or isinstance(first, bool | np.bool_)
            what = "truth values" if truth else "text" if isinstance(first, str) else "objects"
            raise DataError(
                f"labels_key={self.labels_key!r} holds {what} (first: {first!r}), not numbers; convert them with "
                "pandas.to_numeric, or fine-tune the task 'annotation' if they are classes."
            )
        found = np.asarray(values.astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan))
        if np.isinf(found).any():
            raise DataError(f"labels_key={self.labels_key!r} holds infinite values; replace them by numpy.nan.")
        return found

    def make_head(self, n_latent: int, module: nn.Module) -> PredictionHead:
        """Make the head, with one output: the standardized number."""
        return PredictionHead(n_latent, 1, **self.head)

    def _standardized(self, values: np.ndarray) -> np.ndarray:
        if self.center is None or self.scale is None:
            raise TrainingError("center and scale are not known yet; give both, or fine-tune with cells.")
        return (values - self.center) / self.scale

    def _in_units(self, outputs: np.ndarray) -> np.ndarray:
        assert self.center is not None
        assert self.scale is not None
        return outputs[:, 0].astype(np.float64) * self.scale + self.center

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the number of each cell."""
        self._targets = self._standardized(self.numbers_of(cells.column(self.labels_key))).astype(np.float32)
        if missing := int(np.isnan(self._targets[train_rows]).sum()):
            raise DataError(
                f"{missing} of {len(train_rows)} training cells have no number in labels_key={self.labels_key!r}; "
                "leave them out of the training rows."
            )

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Standardize what the head sees, and start it at the ridge regression on the embeddings."""
        targets = self._standardized(self.numbers_of(cells.column(self.labels_key)))
        labeled = np.flatnonzero(~np.isnan(targets))
        tuned: FineTunedModule = module
        fit = (lambda features: fit_ridge(features, targets[labeled])) if self.probe_first else None
        probe(tuned, cells.take(labeled), tokenizer, self, fit)

    def targets(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the standardized number of each cell, NaN where there is none."""
        if self._targets is None:
            raise TrainingError(
                "the numbers of the cells are not known; call bind(cells, train_rows) of the task first."
            )
        return {"target": torch.from_numpy(self._targets[rows])}

    def loss_of(
        self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of the cells that have a number, and sums that figures are made of."""
        predicted, target = outputs[:, 0].float(), batch["target"]
        labeled = ~torch.isnan(target)
        # Without a number the prediction is right. Leaving these cells out would wait for a GPU.
        known = torch.where(labeled, target, predicted.detach())
        summed = _LOSSES[self.loss_function](predicted, known, reduction="sum")
        error, number = (predicted - known).detach(), target.nan_to_num(0.0)
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

    def predict(  # type: ignore[override]
        self, predictor: Predictor, adata: AnnData | None, *, key_added: str | None = None
    ) -> pd.DataFrame:
        """Predict the number of each cell, in the units of the column.

        Parameters
        ----------
        predictor, adata
            The model over the cells, and where to write; None: nowhere.
        key_added
            Column of obs to write, float32, in place of ``"scforge_<labels_key>"``.

        Returns
        -------
        The column ``prediction``, float32.
        """
        import pandas as pd

        values = self._in_units(predictor.outputs()).astype(np.float32)
        index = pd.RangeIndex(len(values)) if adata is None else adata.obs_names
        found = pd.DataFrame({"prediction": values}, index=index)
        if adata is not None:
            adata.obs[key_added or f"scforge_{self.labels_key}"] = values
        return found

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score predicted numbers, beside baselines that learned from the same training cells.

        Figures: ``mae``, ``rmse`` (in units of the column), ``r2``, ``pearson``, ``spearman``, of ``n_scored`` cells;
        ``n_unlabeled`` have no number.

        Raises
        ------
        DataError
            If no cell has a number.
        """
        import pandas as pd

        truth = self.numbers_of(context.cells.column(self.labels_key).iloc[context.rows])
        known = ~np.isnan(truth)
        if not known.any():
            raise DataError(f"labels_key={self.labels_key!r} has no number for any of the {len(known)} scored cells.")
        rows = context.rows[known]
        methods = {"scforge": self._in_units(context.predictor.outputs(rows))}
        inputs = baseline_inputs(context, rows)
        if inputs is not None:
            assert context.train_cells is not None
            training = self.numbers_of(context.train_cells.column(self.labels_key).iloc[inputs.rows])
            methods |= regression_baselines(inputs, training)
        counts = {"n_scored": len(rows), "n_unlabeled": int((~known).sum())}
        table = {name: {**regression_figures(truth[known], found), **counts} for name, found in methods.items()}
        return Evaluated(pd.DataFrame.from_dict(table, orient="index").rename_axis("method"))
