"""Predictions of the effects of perturbations that need no deep model.

They take matrices of training effects, so that they cannot see a held-out cell.

Shapes: N training effects, Q effects to predict, G genes, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from scforge.errors import DataError

__all__ = ["KnownEffects", "WantedEffects", "baseline_effects", "gene_scores", "linear_effects"]

PENALTY = 0.1
N_COMPONENTS = 10


@dataclass(frozen=True)
class KnownEffects:
    """Effects that were measured on training cells.

    Attributes
    ----------
    targets
        Names of what was perturbed, of each effect, N tuples.
    contexts
        Context of each effect, e.g. the cell type, N names; all the same where there is one only.
    deltas
        Change of the mean log1p CP10K against the controls of the context, float, shape (N, G).
    controls
        Mean log1p CP10K of the controls of each context, also of contexts without effects, shape (G,) each. In those
        without effects, which may come from other data, NaN for genes that were not measured.

    Examples
    --------
    >>> import numpy as np
    >>> known = KnownEffects((("A",),), ("T cell",), np.array([[0.5, -1.0]]), {"T cell": np.array([1.0, 2.0])})
    >>> known.deltas.shape, known.controls["T cell"].shape
    ((1, 2), (2,))
    """

    targets: tuple[tuple[str, ...], ...]
    contexts: tuple[str, ...]
    deltas: np.ndarray
    controls: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if not len(self.targets) == len(self.contexts) == len(self.deltas) > 0:
            raise DataError(
                f"there are {len(self.targets)} targets, {len(self.contexts)} contexts and {len(self.deltas)} effects; "
                "give one of each for at least one effect."
            )

    def within(self, context: str) -> np.ndarray:
        """Return the effects in a context, of all contexts if it has none, int64."""
        own = [i for i, name in enumerate(self.contexts) if name == context]
        return np.array(own or range(len(self.contexts)), dtype=np.int64)

    def of(self, targets: tuple[str, ...], context: str) -> np.ndarray:
        """Return the mean effect of a perturbation in a context, elsewhere if it is not known there; else NaN, (G,)."""
        same = [i for i, some in enumerate(self.targets) if some == targets]
        here = [i for i in same if self.contexts[i] == context]
        if not same:
            return np.full(self.deltas.shape[1], np.nan)
        return self.deltas[here or same].mean(axis=0)

    def mean(self, context: str) -> np.ndarray:
        """Return the mean effect in a context (of all, if it has none), shape (G,)."""
        return self.deltas[self.within(context)].mean(axis=0)


@dataclass(frozen=True)
class WantedEffects:
    """What is to be predicted.

    Attributes
    ----------
    targets, contexts
        As in :class:`KnownEffects`, Q of each.
    genes
        Number of the gene (column of the effects) that a target is, where it is one.
    gene_features
        Vector of a target that a model has, shape (D,) each.
    context_features
        Vector of a context that a model has, shape (D,) each.

    Examples
    --------
    >>> wanted = WantedEffects(targets=(("A", "B"),), contexts=("T cell",), genes={"A": 0, "B": 1})
    >>> wanted.targets[0]
    ('A', 'B')
    """

    targets: tuple[tuple[str, ...], ...]
    contexts: tuple[str, ...]
    genes: Mapping[str, int] = field(default_factory=dict)
    gene_features: Mapping[str, np.ndarray] = field(default_factory=dict)
    context_features: Mapping[str, np.ndarray] = field(default_factory=dict)


def baseline_effects(known: KnownEffects, wanted: WantedEffects) -> dict[str, np.ndarray]:
    """Return what each baseline predicts.

    Parameters
    ----------
    known
        Effects of the training.
    wanted
        What to predict.

    Returns
    -------
    Deltas, float64, shape (Q, G), NaN where only `controls` of a context that lack the gene could tell, of

    ``no_change``
        Nothing happens.
    ``train_mean``
        The mean of all training effects in the same context, or in all contexts if there are none.
    ``overall_mean``
        The mean of all training effects in all contexts. Only where the mean of a wanted context is another one.
    ``control_mean``
        The mean of the controls of all contexts, in place of those of its own.
    ``perturbation_mean``
        The mean effect of the same perturbation in other contexts. Only where a wanted one has some.
    ``additive``
        The sum of the effects of the parts of a combination; a part without an effect of its own counts as the mean
        of the single ones. Only where a combination is wanted.
    ``linear_pca``, ``linear_embedding``
        :func:`linear_effects` with what the training effects, and the model, know of the perturbed genes. For a
        perturbation that was seen in other contexts: of the contexts.
    ``nearest``
        The effect of the training perturbation with the most similar genes in :func:`gene_scores` (cosine); for a
        perturbation that was seen in other contexts, its effect in the context with the nearest controls.

    Examples
    --------
    >>> import numpy as np
    >>> deltas = np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> known = KnownEffects((("A",), ("B",)), ("all", "all"), deltas, {"all": np.ones(3)})
    >>> made = baseline_effects(known, WantedEffects((("A", "B"),), ("all",)))
    >>> made["train_mean"].tolist(), made["additive"].tolist()
    ([[0.5, 1.0, 0.0]], [[1.0, 2.0, 0.0]])
    """
    scores = gene_scores(known)
    of_genes = {name: scores[gene] for name, gene in wanted.genes.items()}
    found = {
        "no_change": np.zeros((len(wanted.targets), known.deltas.shape[1])),
        "train_mean": np.array([known.mean(context) for context in wanted.contexts]),
        "control_mean": _control_mean(known, wanted),
    }
    if len(set(known.contexts)) > 1 and not {*wanted.contexts}.isdisjoint(known.contexts):
        found["overall_mean"] = np.tile(known.deltas.mean(axis=0), (len(wanted.targets), 1))
    if any(some in known.targets for some in wanted.targets):
        found["perturbation_mean"] = _or_mean(known, wanted, [known.of(*one) for one in _pairs(wanted)])
    if any(len(some) > 1 for some in wanted.targets):
        found["additive"] = _additive(known, wanted)
    found["linear_pca"] = _linear(known, wanted, of_genes, _context_scores(known))
    found["linear_embedding"] = _linear(known, wanted, wanted.gene_features, wanted.context_features)
    found["nearest"] = _nearest(known, wanted, of_genes)
    return found


def gene_scores(known: KnownEffects, n_comps: int = N_COMPONENTS) -> np.ndarray:
    """Return scores of genes in the PCA of the expression under all training perturbations, float64, shape (G, D).

    Genes are the observations, the mean expression of each group of cells is a variable, as in the linear model of
    Ahlmann-Eltze et al. 2025; D is `n_comps`, or less where there are fewer effects.
    """
    expression = np.array([known.controls[name] for name in known.contexts]) + known.deltas
    plain = np.array([known.controls[name] for name in sorted(set(known.contexts))])
    of_genes = np.concatenate([plain, expression]).T
    of_genes = of_genes - of_genes.mean(axis=0)
    left, values, _ = np.linalg.svd(of_genes, full_matrices=False)
    return (left * values)[:, :n_comps]


def linear_effects(
    deltas: np.ndarray, genes: np.ndarray, seen: np.ndarray, wanted: np.ndarray, *, penalty: float = PENALTY
) -> np.ndarray:
    """Predict effects by the bilinear model of Ahlmann-Eltze, Huber and Anders (Nat Methods 2025).

    With Y the training effects (genes x perturbations) less their mean b over perturbations, A features of genes, B
    features of perturbations (one column each) and I the identity::

        W = (A'A + penalty I)^-1 A' Y B' (B B' + penalty I)^-1,    prediction = A W B_wanted + b

    Parameters
    ----------
    deltas
        Training effects, shape (N, G).
    genes
        Features of all genes, shape (G, D).
    seen, wanted
        Features of the training perturbations, (N, E), and of those to predict, (Q, E); rows of NaN where there are
        none. Such a training perturbation counts for b alone, such a wanted one is predicted to be b.
    penalty
        Of both ridge regressions.

    Returns
    -------
    Float64, shape (Q, G).
    """
    center = deltas.mean(axis=0)
    fitted = np.isfinite(seen).all(axis=1)
    predicted = np.tile(center, (len(wanted), 1))
    known = np.isfinite(wanted).all(axis=1)
    if not fitted.any() or not known.any():
        return predicted
    y_gn, b_en = (deltas[fitted] - center).T, seen[fitted].T
    of_genes = np.linalg.solve(genes.T @ genes + penalty * np.eye(genes.shape[1]), genes.T @ y_gn @ b_en.T)
    weights = np.linalg.solve(b_en @ b_en.T + penalty * np.eye(len(b_en)), of_genes.T).T
    predicted[known] += (genes @ weights @ wanted[known].T).T
    return predicted


def _pairs(wanted: WantedEffects) -> list[tuple[tuple[str, ...], str]]:
    return list(zip(wanted.targets, wanted.contexts, strict=True))


def _or_mean(known: KnownEffects, wanted: WantedEffects, effects: list[np.ndarray]) -> np.ndarray:
    """Put the mean training effect where an effect is not known."""
    return np.array(
        [
            known.mean(context) if np.isnan(effect).any() else effect
            for effect, context in zip(effects, wanted.contexts, strict=True)
        ]
    )


def _control_mean(known: KnownEffects, wanted: WantedEffects) -> np.ndarray:
    mean = np.mean(list(known.controls.values()), axis=0)
    return np.array([mean - known.controls[context] for context in wanted.contexts])


def _additive(known: KnownEffects, wanted: WantedEffects) -> np.ndarray:
    found = []
    for targets, context in _pairs(wanted):
        singles = [i for i in known.within(context) if len(known.targets[i]) == 1]
        typical = known.deltas[singles].mean(axis=0) if singles else known.mean(context)
        parts = [known.of((target,), context) for target in targets]
        found.append(np.sum([typical if np.isnan(part).any() else part for part in parts], axis=0))
    return np.array(found)


def _sums(targets: tuple[tuple[str, ...], ...], features: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the sum of the features of the targets of each perturbation; NaN where one has none, shape (., D)."""
    n_dims = len(next(iter(features.values()))) if features else 1
    nothing = np.full(n_dims, np.nan)
    return np.array([np.sum([features.get(target, nothing) for target in some], axis=0) for some in targets])


def _context_scores(known: KnownEffects) -> dict[str, np.ndarray]:
    """Return components of the controls of contexts, which the wanted effects may be in, too."""
    names = sorted(known.controls)
    means = np.array([known.controls[name] for name in names])
    means = means[:, np.isfinite(means).all(axis=0)]
    left, values, _ = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    scores = (left * values)[:, :N_COMPONENTS]
    return dict(zip(names, scores, strict=True))


def _linear(
    known: KnownEffects,
    wanted: WantedEffects,
    gene_features: Mapping[str, np.ndarray],
    context_features: Mapping[str, np.ndarray],
) -> np.ndarray:
    genes = gene_scores(known)
    seen = _sums(known.targets, gene_features)
    asked = _sums(wanted.targets, gene_features)
    found = np.empty((len(wanted.targets), known.deltas.shape[1]))
    for place, (targets, context) in enumerate(_pairs(wanted)):
        same = np.array([i for i, some in enumerate(known.targets) if some == targets], dtype=np.int64)
        if len(same):
            by_context = _sums(tuple((name,) for name in known.contexts), context_features)[same]
            own = _sums(((context,),), context_features)
            found[place] = linear_effects(known.deltas[same], genes, by_context, own)[0]
        else:
            rows = known.within(context)
            found[place] = linear_effects(known.deltas[rows], genes, seen[rows], asked[place : place + 1])[0]
    return found


def _nearest(known: KnownEffects, wanted: WantedEffects, features: Mapping[str, np.ndarray]) -> np.ndarray:
    seen, asked = _sums(known.targets, features), _sums(wanted.targets, features)
    found = []
    for own, (targets, context) in zip(asked, _pairs(wanted), strict=True):
        same = [i for i, some in enumerate(known.targets) if some == targets]
        rows = np.array([i for i in known.within(context) if np.isfinite(seen[i]).all()], dtype=np.int64)
        if same:
            # Over the genes that both measured.
            away = [np.nansum((known.controls[known.contexts[i]] - known.controls[context]) ** 2) for i in same]
            found.append(known.deltas[same[int(np.argmin(away))]])
        elif len(rows) and np.isfinite(own).all():
            lengths = np.linalg.norm(seen[rows], axis=1) * np.linalg.norm(own)
            similar = np.divide(seen[rows] @ own, lengths, out=np.zeros(len(rows)), where=lengths > 0)
            found.append(known.deltas[rows[int(np.argmax(similar))]])
        else:
            found.append(known.mean(context))
    return np.array(found)
