"""Predicted effects of perturbations as an AnnData.

Shapes: Q effects to predict, G genes, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from scforge._checks import check_count
from scforge._constants import UNS_KEY
from scforge.data.cells import Cells, choose_rows
from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.eval.pseudobulk import moments
from scforge.models._utils import evaluating

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.finetuning.context import Predictor
    from scforge.finetuning.tasks._perturbation_conditions import Conditions
    from scforge.finetuning.tasks._perturbation_head import PerturbationHead
    from scforge.finetuning.tasks.perturbation import Perturbation

__all__ = ["MOST_INPUTS", "Pair", "control_means", "effects_for", "predict_effects", "rows_by_context"]

MOST_INPUTS = 2048
"""Controls of a context that a prediction is the mean over."""


class Pair(NamedTuple):
    """A perturbation in a context."""

    targets: tuple[str, ...]
    context: str


def predict_effects(
    task: Perturbation,
    predictor: Predictor,
    *,
    perturbations: Sequence[str] | None,
    contexts: Sequence[str] | None,
    n_cells: int | None,
) -> AnnData:
    """Predict mean expression under perturbations.

    Parameters
    ----------
    task
        The task.
    predictor
        The model over cells, the controls of which are its inputs.
    perturbations
        Names, combinations joined by `separator`; None takes those of the cells that the model was not trained on.
    contexts
        Names of contexts; None takes those in which the perturbations are among the cells, or if `perturbations` are
        given, all that have controls.
    n_cells
        Most controls of a context that the prediction is the mean over; None takes up to 2,048.

    Returns
    -------
    One row for each perturbation in each context, over the genes of the model: ``X``, the predicted mean log1p CP10K
    (float32; the mean of the controls plus the effect, and not below 0), ``layers["delta"]``, the effect, ``obs`` with
    ``perturbation``, ``context``, ``n_controls`` and ``is_seen`` (whether it was trained on), ``var`` with ``measured``
    (whether the cells have the gene; where not, the mean of the controls is not known and ``X`` is NaN, the effect is
    there all the same), and the units in ``uns["scforge"]["predicted"]``.

    Raises
    ------
    OptionError
        If a name is unknown, or there is nothing to predict.
    DataError
        If there are no controls, or no column that says which cells are.
    """
    import pandas as pd
    from anndata import AnnData

    if n_cells is not None:
        check_count("n_cells", n_cells, "controls")
    cells = predictor.cells
    assert cells.vocab is not None
    try:
        cells.column(task.perturbation_key)
    except DataError as error:
        raise DataError(
            f"perturbation_key={task.perturbation_key!r} is not a column of obs of these cells; where none of them is "
            f"perturbed, set adata.obs[{task.perturbation_key!r}] = {task.control!r}."
        ) from error
    conditions = task.conditions(cells.column)
    controls = rows_by_context(conditions, np.flatnonzero(conditions.controls))
    pairs = _wanted(task, conditions, controls, perturbations, contexts)
    used = {
        name: choose_rows(len(cells), n_cells or MOST_INPUTS, rows=controls[name])
        for name in {p.context for p in pairs}
    }
    deltas = effects_for(task, predictor, pairs, used)
    means = control_means(cells, controls)
    absolute = np.maximum(np.array([means[pair.context] for pair in pairs]) + deltas, 0.0)
    measured = np.ones(cells.vocab.n_genes, dtype=bool) if cells.measured is None else cells.measured
    absolute[:, ~measured] = np.nan
    obs = pd.DataFrame(
        {
            "perturbation": pd.Categorical([task.name_of(pair.targets) for pair in pairs]),
            "context": pd.Categorical([pair.context for pair in pairs]),
            "n_controls": [len(used[pair.context]) for pair in pairs],
            "is_seen": [task.is_seen(*pair) for pair in pairs],
        },
        index=[_row_name(task, pair) for pair in pairs],
    )
    var = pd.DataFrame({"measured": measured}, index=list(cells.vocab.genes))
    made = AnnData(absolute.astype(np.float32), obs=obs, var=var)
    made.layers["delta"] = deltas.astype(np.float32)
    made.uns[UNS_KEY] = {
        "predicted": {
            "X": "mean of log1p of counts per 10,000",
            "delta": "difference of X to the controls of the context",
            "control": task.control,
            "perturbation_key": task.perturbation_key,
        }
    }
    return made


def _row_name(task: Perturbation, pair: Pair) -> str:
    name = task.name_of(pair.targets)
    return name if task.context_key is None else f"{name} in {pair.context}"


def rows_by_context(conditions: Conditions, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows of each context that has some."""
    found = {name: rows[conditions.context[rows] == code] for code, name in enumerate(conditions.contexts)}
    return {name: some for name, some in found.items() if len(some)}


def _wanted(
    task: Perturbation,
    conditions: Conditions,
    controls: Mapping[str, np.ndarray],
    perturbations: Sequence[str] | None,
    contexts: Sequence[str] | None,
) -> list[Pair]:
    """Return the effects to predict, each once."""
    for name in contexts or ():
        if name not in controls:
            raise OptionError(
                f"contexts names {name!r}, where there is no control cell{did_you_mean(name, controls)} "
                f"(there are some in: {listing(controls)})"
            )
    if perturbations is None:
        present = conditions.pairs(np.arange(len(conditions.perturbation)))
        pairs = [Pair(task.parts(name), place) for name, where in present.items() for place in where]
        pairs = [pair for pair in pairs if not task.is_seen(*pair) and (contexts is None or pair.context in contexts)]
        if not pairs:
            raise OptionError(
                "perturbations=None, but the cells have no perturbation that the model was not trained on; name some."
            )
        if without := sorted({pair.context for pair in pairs} - {*controls}):
            raise DataError(
                f"the contexts {listing(without)} have no control cell, which a prediction begins with; add controls."
            )
        return pairs
    if isinstance(perturbations, str) or not len(perturbations):
        raise OptionError(f"perturbations={perturbations!r} is not a list of names; give e.g. ['STAT1'].")
    targets = [task.parts(name) for name in perturbations]
    if () in targets:
        name = perturbations[targets.index(())]
        raise OptionError(f"perturbations names {name!r}, which is the control; leave it out.")
    return list(dict.fromkeys(Pair(some, place) for some in targets for place in contexts or controls))


@torch.inference_mode()
def effects_for(
    task: Perturbation, predictor: Predictor, pairs: Sequence[Pair], inputs: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the predicted effects, means over the inputs of the context, float64, shape (Q, G)."""
    vocab = predictor.cells.vocab
    assert vocab is not None
    encoded = task.encode_targets([pair.targets for pair in pairs], vocab)
    head: PerturbationHead = predictor.module.head
    device = head.basis.device
    found = np.empty((len(pairs), vocab.n_genes))
    with evaluating(head):
        for place in sorted({pair.context for pair in pairs}):
            z_bd = torch.from_numpy(predictor.embedding(inputs[place])).to(device)
            for row in (i for i, pair in enumerate(pairs) if pair.context == place):
                given = {name: value[row : row + 1].expand(len(z_bd), -1).to(device) for name, value in encoded.items()}
                mean = head.coefficients(z_bd, given["perturbed_tokens"], given["perturbed_targets"]).mean(dim=0)
                found[row] = (mean @ head.basis)[vocab.n_special :].float().cpu().numpy()
    return found


def control_means(cells: Cells, controls: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the mean log1p CP10K of the controls of each context, float64, shape (G,)."""
    names = sorted(controls)
    rows = np.concatenate([controls[name] for name in names])
    codes = np.repeat(np.arange(len(names)), [len(controls[name]) for name in names])
    order = np.argsort(rows)
    return dict(zip(names, moments(cells, rows[order], codes[order], len(names)).mean, strict=True))
