"""What a model that predicts a column of obs has to beat, fitted on its training cells alone.

Shapes: M training cells, N scored cells, H variable genes, D dimensions, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge._checks import check_count
from scforge.data.cells import choose_rows
from scforge.errors import DataError, warn
from scforge.eval.expression import ExpressionSpace, log_expression

if TYPE_CHECKING:
    from scforge.data.cells import Cells

__all__ = ["BaselineInputs", "classification_baselines", "multi_label_baselines", "regression_baselines"]

_N_NEIGHBORS = 15
_RIDGE = np.logspace(-2, 4, 13)
"""Penalties that ridge regression chooses among, by leave-one-out cross-validation on the training cells."""


@dataclass(frozen=True)
class BaselineInputs:
    """What baselines see of training cells and of scored cells.

    Attributes
    ----------
    rows
        Rows of the training cells that baselines are fitted on, int64, shape (M,).
    components
        Principal components of the variable genes: of the training cells (M, D), and of the scored cells (N, D).
    genes
        The scaled variable genes, CSR: (M, H) and (N, H).
    embeddings
        Further representations, by the name of the baseline that learns from them: (M, D) and (N, D).
    """

    rows: np.ndarray
    components: tuple[np.ndarray, np.ndarray]
    genes: tuple[sparse.csr_matrix, sparse.csr_matrix]
    embeddings: dict[str, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(
        cls,
        train_cells: Cells,
        train_rows: np.ndarray,
        cells: Cells,
        rows: np.ndarray,
        *,
        max_cells: int = 50_000,
        seed: int = 0,
    ) -> BaselineInputs:
        """Choose genes and find components on the training cells, and see all cells through them.

        Parameters
        ----------
        train_cells, train_rows
            The training cells, and which of them.
        cells, rows
            The scored cells over the same vocabulary, and which of them.
        max_cells
            Fit baselines on at most so many training cells, drawn at random.
        seed
            Seed of that and of the components.

        Raises
        ------
        DataError
            If the vocabularies differ, or there are too few training cells.

        Warns
        -----
        ScforgeWarning
            If not all training cells are taken.
        """
        check_count("max_cells", max_cells, "cells")
        if train_cells.vocab is not None and cells.vocab is not None and train_cells.vocab.genes != cells.vocab.genes:
            raise DataError("cells are over another vocabulary than train_cells; open both over the same genes.")
        chosen = choose_rows(len(train_cells), max_cells, rows=train_rows, seed=seed)
        if len(chosen) < len(train_rows):
            warn(f"baselines are fitted on {len(chosen):,} of the {len(train_rows):,} training cells.")
        expression = log_expression(train_cells, chosen), log_expression(cells, rows)
        space = ExpressionSpace.fit(expression[0], seed=seed)
        return cls(
            rows=chosen,
            components=(space.components(expression[0]), space.components(expression[1])),
            genes=(space.scaled(expression[0]), space.scaled(expression[1])),
            embeddings={},
        )


def classification_baselines(inputs: BaselineInputs, classes: np.ndarray, n_classes: int) -> dict[str, np.ndarray]:
    """Return the probability of each class for each scored cell, float64, shape (N, C), by the name of the baseline.

    ``logistic_regression_pca`` and ``knn_pca`` (15 neighbours) see 50 principal components;
    ``logistic_regression_genes`` is CellTypist's model (Dominguez Conde et al. 2022: one logistic regression for each
    class, L2, C = 1, on scaled log1p CP10K) over the variable genes; ``majority_class`` knows the shares of the
    classes. Each further embedding gets a logistic regression of its standardised dimensions.

    Parameters
    ----------
    inputs
        What the baselines see.
    classes
        Class of each training cell, 0 to C - 1, shape (M,).
    n_classes
        Number of classes C.
    """
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.neighbors import KNeighborsClassifier

    def probabilities(model: Any, features: tuple[Any, Any]) -> np.ndarray:
        full = np.zeros((features[1].shape[0], n_classes))
        known = np.unique(classes)
        if len(known) == 1:
            full[:, known] = 1.0
        elif features[1].shape[0]:
            full[:, known] = model.fit(features[0], classes).predict_proba(features[1])
        return full

    shares = np.bincount(classes, minlength=n_classes) / max(1, len(classes))
    neighbors = KNeighborsClassifier(min(_N_NEIGHBORS, len(classes)))
    return {
        "logistic_regression_pca": probabilities(_logistic(), inputs.components),
        "knn_pca": probabilities(neighbors, inputs.components),
        "logistic_regression_genes": probabilities(OneVsRestClassifier(_logistic(scale=False)), inputs.genes),
        **{name: probabilities(_logistic(), both) for name, both in inputs.embeddings.items()},
        "majority_class": np.tile(shares, (inputs.components[1].shape[0], 1)),
    }


def regression_baselines(inputs: BaselineInputs, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return a prediction for each scored cell, float64, shape (N,), by the name of the baseline.

    ``ridge_pca`` and ``knn_pca`` see 50 principal components, ``mean`` the mean of the training cells. Each further
    embedding gets a ridge regression of its standardised dimensions. Penalties are chosen on the training cells.

    Parameters
    ----------
    inputs
        What the baselines see.
    target
        Target of each training cell, shape (M,).
    """
    from sklearn.neighbors import KNeighborsRegressor

    def predicted(model: Any, features: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        if not len(features[1]):
            return np.zeros(0)
        return np.asarray(model.fit(features[0], target).predict(features[1]), dtype=np.float64)

    return {
        "ridge_pca": predicted(_ridge(), inputs.components),
        "knn_pca": predicted(KNeighborsRegressor(min(_N_NEIGHBORS, len(target))), inputs.components),
        **{name: predicted(_ridge(), both) for name, both in inputs.embeddings.items()},
        "mean": np.full(inputs.components[1].shape[0], float(np.mean(target))),
    }


def multi_label_baselines(inputs: BaselineInputs, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Return the probability of each label for each scored cell, float64, shape (N, C), by the name of the baseline.

    One logistic regression a label on 50 principal components (``logistic_regression_pca``) and on each further
    embedding; ``label_frequency`` knows the share of the training cells that have a label.

    Parameters
    ----------
    inputs
        What the baselines see.
    targets
        Whether each training cell has each label, bool, shape (M, C).
    """

    def probabilities(features: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        columns = []
        for has in targets.T:
            if has.all() or not has.any() or not len(features[1]):
                columns.append(np.full(len(features[1]), float(has.all())))
            else:
                columns.append(_logistic().fit(features[0], has).predict_proba(features[1])[:, 1])
        return np.stack(columns, axis=1)

    return {
        "logistic_regression_pca": probabilities(inputs.components),
        **{name: probabilities(both) for name, both in inputs.embeddings.items()},
        "label_frequency": np.tile(targets.mean(axis=0), (len(inputs.components[1]), 1)),
    }


def _logistic(*, scale: bool = True) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = LogisticRegression(max_iter=2_000)
    return make_pipeline(StandardScaler(), model) if scale else model


def _ridge() -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(_RIDGE))
