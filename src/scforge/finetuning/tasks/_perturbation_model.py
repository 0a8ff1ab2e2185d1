"""Conditions of a perturbation experiment, training data, and the head that predicts responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from torch import nn

from scforge._columns import texts_of
from scforge._constants import PAD_ID
from scforge.data.cells import Cells, choose_rows
from scforge.data.expression import log_expression
from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.data.sampling import cell_keys
from scforge.errors import DataError, OptionError, listing, suggest
from scforge.eval.perturbation import BANDS, BASE, N_COMPONENTS, bands_of, fit_kernels, size_of
from scforge.eval.perturbation_metrics import de_weights
from scforge.finetuning.base import Column
from scforge.finetuning.splits import Split
from scforge.models.components.gene_vectors import GeneVectorEmbedding
from scforge.models.components.heads import Standardize
from scforge.perturbation.effects import effects_of, moments, moments_of

CONTROL, UNLABELED = -1, -2
"""Codes of control cells, and of cells without a label."""

ALL = "all"
"""Name of the context if there is only one."""

_TEST_CONTROLS = 1 / 3

_MAX_CONTROLS = 2048
"""Number of controls per context from which inputs are sampled."""

_STREAM = 0x6374726C  # "ctrl"

_SMALLEST = 1e-10
"""Fraction of the largest singular value below which singular values count as zero."""

_PIECE = 4096
"""Number of cells that are read at once."""

MAX_FEATURES = BANDS[-1]
"""Number of components from a source of gene vectors."""


class Pair(NamedTuple):
    """A perturbation in a context."""

    targets: tuple[str, ...]
    context: str


@dataclass(frozen=True)
class Conditions:
    """Perturbation and context of each cell.

    Attributes
    ----------
    names
        Names of the perturbations, with sorted components.
    targets
        Targets of each perturbation.
    contexts
        Names of the contexts.
    perturbation
        Index of the perturbation of each cell, -1 for controls, -2 for cells without a label, int64, shape (N,).
    context
        Index of the context of each cell, int64, shape (N,). For cells without a context, both the context and the
        `perturbation` are -2.
    """

    names: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]
    contexts: tuple[str, ...]
    perturbation: np.ndarray
    context: np.ndarray

    @classmethod
    def read(
        cls, column: Column, perturbation_key: str, control: str, separator: str | None, context_key: str | None
    ) -> Conditions:
        """Read perturbations and contexts from columns of obs.

        Raises
        ------
        DataError
            If a column is missing or cannot be read, or there are no controls.
        """
        labels = texts_of(column(perturbation_key), key=perturbation_key, argument="perturbation_key")
        labeled = np.asarray(labels.notna())
        context = np.zeros(len(labels), dtype=np.int64)
        contexts: tuple[str, ...] = (ALL,)
        if context_key is not None:
            of_cells = texts_of(column(context_key), key=context_key, argument="context_key")
            context = np.array(of_cells.codes, dtype=np.int64)
            contexts = tuple(str(name) for name in of_cells.categories)
            labeled = labeled & (context >= 0)
        keys = PerturbationKeys(perturbation_key, control=control, separator=separator)
        of_labeled = parse_perturbations(pd.DataFrame({perturbation_key: labels[labeled]}), keys)
        targets = sorted(set(of_labeled) - {()})
        number = {some: i for i, some in enumerate(targets)} | {(): CONTROL}
        perturbation = np.full(len(labels), UNLABELED, dtype=np.int64)
        perturbation[labeled] = [number[some] for some in of_labeled]
        context[~labeled] = UNLABELED
        names = tuple((separator or "+").join(some) for some in targets)
        return cls(names, tuple(targets), contexts, perturbation, context)

    @property
    def perturbed(self) -> np.ndarray:
        """Perturbed cells, bool, shape (N,)."""
        return self.perturbation >= 0

    @property
    def controls(self) -> np.ndarray:
        """Control cells, bool, shape (N,)."""
        return self.perturbation == CONTROL

    def pairs(self, rows: np.ndarray) -> list[Pair]:
        """Return the perturbations of the cells `rows` in each context, each once."""
        rows = rows[self.perturbation[rows] >= 0]
        found = np.unique(np.stack([self.perturbation[rows], self.context[rows]], axis=1), axis=0)
        return [Pair(self.targets[perturbation], self.contexts[context]) for perturbation, context in found.tolist()]


def hold_out(
    conditions: Conditions,
    *,
    by_context: bool,
    named: Sequence[str] | None,
    known: Callable[[str], bool] | None,
    validation_size: float,
    test_size: float,
    seed: int,
) -> Split:
    """Hold out whole perturbations, or whole contexts.

    A third of the controls in each context are test controls. If nothing is tested, all controls are training controls.

    Parameters
    ----------
    conditions
        Conditions of all cells.
    by_context
        Whether to hold out contexts rather than perturbations.
    named
        Names of the perturbations or contexts in the test set. If None, samples a fraction of `test_size`.
    known
        Function that returns whether a target has a vector without being in the training set, e.g. because it is a gene
        of the model. Perturbations of other targets are sampled only while another perturbation with the same target
        remains. If None, all targets have a vector.
    validation_size, test_size
        Fractions of the perturbations or contexts. If above 0, at least one each is held out, and one for validation
        only if two are left.
    seed
        Random seed for the split.

    Raises
    ------
    OptionError
        If a name is unknown, or nothing is left to train on.
    DataError
        If no cell is perturbed, or a context has too few controls.
    """
    names = conditions.contexts if by_context else conditions.names
    what, argument = ("context", "heldout_contexts") if by_context else ("perturbation", "heldout")
    known = None if by_context else known
    codes = np.where(conditions.perturbed, conditions.context if by_context else conditions.perturbation, UNLABELED)
    present = [int(code) for code in np.unique(codes[codes >= 0])]
    if not present:
        raise DataError("all cells are controls, so there is nothing to learn from; add perturbed cells.")
    number = {names[code]: code for code in present}
    if unknown := [name for name in named or () if name not in number]:
        raise OptionError(
            f"{argument}={unknown[0]!r} is not the label of a perturbed cell{suggest(unknown[0], number, 'labels')}"
        )
    rng = np.random.default_rng(seed)
    order = [int(code) for code in rng.permutation(present)]
    if named is None:
        test = _draw(order, test_size, len(present), known, conditions.targets)
    else:
        test = [number[name] for name in named]
    rest = [code for code in order if code not in test]
    if not rest or (named is None and test_size and not test):
        held_out = listing(names[code] for code in sorted(test) or order)
        raise OptionError(f"holding out {held_out} leaves no {what} to train on; hold out fewer, or set test_size=0.")
    validation = _draw(rest, validation_size, len(present), known, conditions.targets) if len(rest) > 1 else []
    train = [code for code in rest if code not in validation]
    input_controls, test_controls = _split_controls(conditions, rng)
    if not test:
        # Nothing is tested against them.
        input_controls, test_controls = conditions.controls, np.zeros_like(test_controls)
    return Split(
        train=np.flatnonzero(np.isin(codes, train) | input_controls),
        validation=np.flatnonzero(np.isin(codes, validation)),
        test=np.flatnonzero(np.isin(codes, test) | test_controls),
    )


def _draw(
    order: list[int], share: float, n_all: int, known: Callable[[str], bool] | None, targets: Sequence[tuple[str, ...]]
) -> list[int]:
    """Take a fraction of all codes from the front of `order`: at least one, but leave at least one."""
    wanted = min(max(1, round(share * n_all)), len(order) - 1) if share else 0
    if known is None:
        return order[:wanted]
    drawn: list[int] = []
    for code in order:
        if len(drawn) == wanted:
            break
        unknown = {target for target in targets[code] if not known(target)}
        left = [targets[other] for other in order if other not in {code, *drawn}]
        if unknown <= {target for some in left for target in some}:
            drawn.append(code)
    return drawn


def _split_controls(conditions: Conditions, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return which controls are training inputs, and which are test controls, bool, shape (N,)."""
    tested = np.zeros(len(conditions.perturbation), dtype=bool)
    few = []
    for code, name in enumerate(conditions.contexts):
        rows = np.flatnonzero(conditions.controls & (conditions.context == code))
        if len(rows) < 2 and (conditions.perturbed & (conditions.context == code)).any():
            few.append(name)
        tested[rng.permutation(rows)[: round(len(rows) * _TEST_CONTROLS) or len(rows) // 2]] = True
    if few:
        raise DataError(f"the contexts {listing(few)} have fewer than 2 control cells; remove these contexts.")
    return conditions.controls & ~tested, tested


class BoundEffects:
    """Effects in the cells of a training run, and its controls.

    Each effect belongs either to training cells or to held-out cells, never to both.

    Attributes
    ----------
    conditions
        Conditions of all cells.
    groups
        Perturbation and context of each effect, int64, shape (P, 2).
    group
        Index of the effect that a cell belongs to, -1 if there is none, int64, shape (N,).
    trained
        Whether each effect belongs to training cells, bool, shape (P,).
    deltas
        Change in mean log1p CP10K relative to the training controls of the context, float32, shape (P, G).
    weights
        Gene weights in the error of each effect, float32, shape (P, G).
    n_cells
        Number of cells per effect, int64, shape (P,).
    controls
        Mean log1p CP10K of the training controls of each context, float64, shape (C, G); 0 without controls.
    center, axes
        Center and axes of the principal components of `controls`, float64, shapes (G,) and (K, G); rows are zero if
        there are fewer components.
    pool
        Training controls in memory.
    inputs
        Rows of `pool` for each context.

    Raises
    ------
    OptionError
        If a perturbation occurs both in training cells and in held-out cells.
    DataError
        If there are no effects to train on, or a context has no controls.
    """

    def __init__(self, cells: Cells, conditions: Conditions, train_rows: np.ndarray, *, weighted: bool) -> None:
        self.conditions = conditions
        in_training = np.zeros(len(cells), dtype=bool)
        in_training[train_rows] = True
        perturbed = np.flatnonzero(conditions.perturbed)
        pairs = np.stack([conditions.perturbation[perturbed], conditions.context[perturbed]], axis=1)
        self.groups, codes = np.unique(pairs, axis=0, return_inverse=True)
        codes, n_groups = codes.ravel(), len(self.groups)
        n_trained = np.bincount(codes, weights=in_training[perturbed], minlength=n_groups)
        partly = (n_trained > 0) & (n_trained < np.bincount(codes, minlength=n_groups))
        if partly.any():
            names = sorted({conditions.names[perturbation] for perturbation in self.groups[partly, 0].tolist()})
            raise OptionError(
                f"the split separates cells of the same perturbation ({listing(names)}); hold out whole perturbations, "
                "e.g. by omitting split_key."
            )
        self.trained = n_trained > 0
        if not self.trained.any():
            raise DataError("no training cell is perturbed, so there is no effect to learn; change the split.")
        controls = np.flatnonzero(conditions.controls & in_training)
        contexts = conditions.context[controls]
        if without := [conditions.contexts[code] for code in sorted({*self.groups[:, 1]} - {*contexts})]:
            raise DataError(
                f"the contexts {listing(without)} have no training controls to measure effects against; change "
                "the split."
            )
        self.group = np.full(len(cells), -1, dtype=np.int64)
        self.group[perturbed] = codes
        # The groups behind the effects are the controls of each context.
        rows, of_rows = np.concatenate([perturbed, controls]), np.concatenate([codes, n_groups + contexts])
        order = np.argsort(rows)
        measured = moments(cells, rows[order], of_rows[order], n_groups + len(conditions.contexts))
        effects = effects_of(measured, np.arange(n_groups), n_groups + self.groups[:, 1])
        self.deltas, self.n_cells = effects.deltas.astype(np.float32), effects.n_cells
        self.controls = measured.mean[n_groups:]
        means = self.controls[measured.n[n_groups:] > 0]
        self.center, self.axes = means.mean(axis=0), np.zeros((N_COMPONENTS, means.shape[1]))
        _, values, axes = np.linalg.svd(means - self.center, full_matrices=False)
        n_comps = min(N_COMPONENTS, int((values > _SMALLEST * max(values[0], _SMALLEST)).sum()))
        self.axes[:n_comps] = axes[:n_comps]
        self._cells, self._rows, self._of_rows = cells, rows[order], of_rows[order]
        seen = np.ones(effects.deltas.shape[1], dtype=bool) if cells.measured is None else cells.measured
        self.weights = np.zeros(effects.deltas.shape, dtype=np.float32)
        self.weights[:, seen] = de_weights(effects.scores[:, seen]) if weighted else 1.0
        self.weights /= self.weights.mean(axis=1, keepdims=True)
        chosen = [
            choose_rows(len(cells), _MAX_CONTROLS, rows=controls[contexts == code])
            for code in range(len(conditions.contexts))
        ]
        pooled = np.sort(np.concatenate(chosen))
        self.pool = cells.sample(len(pooled), rows=pooled)
        self.inputs = [np.searchsorted(pooled, rows) for rows in chosen]

    def variance_gains(self, basis: np.ndarray) -> np.ndarray:
        """Return the variance of perturbed cells along each basis vector, minus the control variance, shape (P, R)."""
        n_groups, pieces = len(self.groups), range(0, len(self._rows), _PIECE)
        scores = [log_expression(self._cells, self._rows[start : start + _PIECE]) @ basis.T for start in pieces]
        n_all = n_groups + len(self.conditions.contexts)
        variance = moments_of(sparse.csr_matrix(np.concatenate(scores)), self._of_rows, n_all).variance
        return variance[:n_groups] - variance[n_groups + self.groups[:, 1]]

    def draw(self, rows: np.ndarray, *, epoch: int, seed: int) -> np.ndarray:
        """Return a random training control from the context of each perturbed cell, as pool rows, shape (B,)."""
        keys = cell_keys(rows, seed=seed, epoch=epoch, stream=_STREAM)
        contexts = self.conditions.context[rows]
        drawn = np.empty(len(rows), dtype=np.int64)
        for context in np.unique(contexts):
            here = contexts == context
            candidates = self.inputs[context]
            drawn[here] = candidates[(keys[here] % np.uint64(len(candidates))).astype(np.int64)]
        return drawn


class PerturbationHead(nn.Module):
    """Predict the effect of a perturbation on a cell: a linear model plus a network, in a low-rank basis.

    Let e_g be the features of a perturbed gene, v_g a vector for each target in the training set, k the features of the
    context, and z the standardized embedding of a control cell::

        c = sum over perturbed g of (b + W e_g + v_g) + K k
        delta = (c + w network(z, c)) U

    The linear part c is fitted once by ridge regression (:func:`fit_linear`) and stays fixed. Training changes the
    network, whose last layer starts at zero, and the encoder. The weight w is chosen on validation perturbations
    (:func:`network_weight`); it is 0 without validation perturbations.

    Parameters
    ----------
    n_latent
        Width D of the embeddings.
    n_tokens
        Number of tokens V; effects contain one value per token, 0 for special tokens.
    n_features
        Number of features F per gene.
    n_targets
        Number of targets in the training set.
    rank
        Rank R of the effects.
    hidden_dim
        Width of the hidden layer in the network; 0 for a linear layer on z.
    dropout
        Dropout rate of the network.
    """

    features: torch.Tensor
    base: torch.Tensor
    of_features: torch.Tensor
    own: torch.Tensor
    of_context: torch.Tensor
    basis: torch.Tensor
    context_center: torch.Tensor
    context_axes: torch.Tensor
    spread: torch.Tensor
    weight: torch.Tensor

    def __init__(
        self,
        n_latent: int,
        n_tokens: int,
        n_features: int,
        n_targets: int,
        rank: int,
        *,
        hidden_dim: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.standardize = Standardize(n_latent)
        sizes = {
            "features": (n_tokens, n_features),
            "base": (rank,),
            "of_features": (rank, n_features),
            # The first row is for targets that are not in the training set.
            "own": (n_targets + 1, rank),
            "of_context": (rank, N_COMPONENTS),
            "basis": (rank, n_tokens),
            "context_center": (n_tokens,),
            "context_axes": (N_COMPONENTS, n_tokens),
            "spread": (rank,),
            "weight": (),
        }
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size))
        last = nn.Linear(hidden_dim or n_latent, rank)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mlp: nn.Sequential | None = None
        self.of_cell: nn.Linear | None = None
        if hidden_dim:
            self.mlp = nn.Sequential(nn.Linear(n_latent + rank, hidden_dim), nn.GELU(), nn.Dropout(dropout), last)
        else:
            self.of_cell = last

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return effects with the full weight of the network, shape (B, V).

        Parameters
        ----------
        embeddings
            Embeddings of control cells, shape (B, D).
        batch
            ``perturbed_tokens`` and ``perturbed_targets``, int64, shape (B, T): the token of each target (PAD if it is
            not a gene), and its number among the targets of the training set, starting at 1 (0 for other targets); and
            ``perturbed_contexts``, the features of the contexts, shape (B, K).
        """
        c_br = self.linear(batch["perturbed_tokens"], batch["perturbed_targets"], batch["perturbed_contexts"])
        return (c_br + self.network(embeddings, c_br)) @ self.basis

    def linear(self, tokens: torch.Tensor, targets: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        """Return the linear part of the effects in the basis, shape (B, R)."""
        n_targets = ((tokens != PAD_ID) | (targets != 0)).sum(dim=1, keepdim=True).to(self.base.dtype)
        of_genes = self.features[tokens].sum(dim=1) @ self.of_features.T
        return n_targets * self.base + of_genes + self.own[targets].sum(dim=1) + contexts @ self.of_context.T

    def network(self, embeddings: torch.Tensor, c_br: torch.Tensor) -> torch.Tensor:
        """Return the output of the network in the basis, shape (B, R)."""
        z_bd = self.standardize(embeddings)
        if self.mlp is None:
            assert self.of_cell is not None
            return self.of_cell(z_bd)
        return self.mlp(torch.cat([z_bd, c_br.to(z_bd.dtype)], dim=1))

    def context_features(self, means: np.ndarray) -> torch.Tensor:
        """Return context features (C, K) from the mean log1p CP10K of controls, which is NaN for unmeasured genes."""
        center, axes = (part.cpu().numpy().astype(np.float64) for part in (self.context_center, self.context_axes))
        start = len(center) - means.shape[1]
        return torch.from_numpy(np.nan_to_num(means - center[start:]) @ axes[:, start:].T).float()


def network_weight(linear: np.ndarray, network: np.ndarray, deltas: np.ndarray, n_cells: np.ndarray) -> float:
    """Return the network weight with the smallest squared error on validation effects, from 0 to 1.

    For each effect, the weight that is best for the other effects is tested. The result is 0 if the mean gain in these
    tests is not larger than its standard error, or if there are fewer than two effects.

    Parameters
    ----------
    linear, network
        Parts of the predicted effects, shape (Q, G).
    deltas
        Measured effects, shape (Q, G).
    n_cells
        Number of cells per effect, by which errors are weighted, shape (Q,).
    """
    shared = n_cells * ((deltas - linear) * network).sum(axis=1)
    size = n_cells * np.square(network).sum(axis=1)
    if len(size) < 2 or not size.all():
        return 0.0
    others = np.clip((shared.sum() - shared) / (size.sum() - size), 0.0, 1.0)
    gains = 2 * others * shared - np.square(others) * size
    if gains.mean() <= gains.std(ddof=1) / np.sqrt(len(gains)):
        return 0.0
    return float(np.clip(shared.sum() / size.sum(), 0.0, 1.0))


@torch.no_grad()
def gene_vectors(module: nn.Module) -> torch.Tensor:
    """Return the embedding of each token in an architecture, shape (V, H).

    Raises
    ------
    OptionError
        If the architecture has no token embeddings.
    """
    if callable(token_table := getattr(module, "token_table", None)):
        return token_table()
    parts = list(module.modules())
    # A GeneVectorEmbedding has a plain one inside, for tokens without a vector.
    for part in parts:
        if isinstance(part, GeneVectorEmbedding):
            ids = torch.arange(part.vocab_size, device=part.learned.weight.device)
            # (A bag of one token is the embedding of that token.)
            return GeneVectorEmbedding.forward(part, ids)
    for part in parts:
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx == PAD_ID:
            return part.weight.detach()
    raise OptionError(
        f"{type(module).__name__} has no gene embedding, which the task 'perturbation' requires; choose another "
        "architecture."
    )


def gene_features(vectors: torch.Tensor, n_special: int, n_features: int) -> torch.Tensor:
    """Return principal components of gene embeddings, scaled to a mean squared length of 1; zeros for special tokens.

    Returns
    -------
    The components, float32, shape (V, F); columns are zero if there are fewer than F components.
    """
    genes = vectors[n_special:].float()
    genes = genes - genes.mean(dim=0)
    _, axes = torch.linalg.eigh(genes.T @ genes)
    scores = genes @ axes.flip(1)[:, :n_features]
    length = scores.square().sum(dim=1).mean().sqrt()
    features = torch.zeros(len(vectors), n_features, device=vectors.device)
    if length > 0:
        features[n_special:, : scores.shape[1]] = scores / length
    return features


@dataclass(frozen=True)
class Observed:
    """Training effects, and the features that explain them.

    Attributes
    ----------
    deltas
        Training effects, shape (N, V).
    n_cells
        Number of cells per effect, shape (N,).
    members
        Target indicators: 1 for the targets of each effect, shape (N, T).
    features
        Sum of the target features of each effect, shape (N, F).
    sources
        Number of features from each source, in order; the sum is F.
    contexts
        Features of the context of each effect, shape (N, K).
    blocks
        Block of each effect, integers, shape (N,); the effects of a block are left out together when scales are
        compared.
    """

    deltas: np.ndarray
    n_cells: np.ndarray
    members: np.ndarray
    features: np.ndarray
    sources: tuple[int, ...]
    contexts: np.ndarray
    blocks: np.ndarray


def blocks_of(groups: np.ndarray, trained: np.ndarray, *, by_context: bool) -> np.ndarray:
    """Return the blocks that are left out together to compare scales: perturbations or contexts, as in the split.

    Parameters
    ----------
    groups
        Perturbation and context of each effect, integers, shape (P, 2).
    trained
        Whether each effect is used for training, bool, shape (P,).
    by_context
        Whether contexts were held out by name. If False, contexts count as held out if a held-out perturbation occurs
        in training in another context.

    Returns
    -------
    Block of each of the N trained effects, shape (N,). If training contains only one unit of the held-out kind, e.g.
    one context, blocks are units of the other kind, e.g. perturbations.
    """
    own = groups[trained]
    axis = int(by_context or np.isin(groups[~trained, 0], own[:, 0]).any())
    several = [len(np.unique(own[:, side])) > 1 for side in (0, 1)]
    return own[:, axis if several[axis] or not several[1 - axis] else 1 - axis]


def fit_linear(observed: Observed, rank: int) -> dict[str, np.ndarray]:
    """Fit the linear part of the head, and return a mapping from buffer name to values.

    The basis consists of the principal components of the effects, without centering. In this basis,
    :func:`scforge.eval.perturbation.fit_kernels` regresses the effects on the number of targets, the targets, their
    features in bands, and the context. A model without informative features predicts the mean.

    Parameters
    ----------
    observed
        The training effects.
    rank
        Rank R of the basis; rows are zero if there are fewer effects.
    """
    deltas, members = observed.deltas.astype(np.float64), observed.members
    _, values, axes = np.linalg.svd(deltas, full_matrices=False)
    kept = int((values[:rank] > _SMALLEST * max(values[0], _SMALLEST)).sum())
    basis = np.zeros((rank, deltas.shape[1]))
    basis[:kept] = axes[:kept]
    counts, starts = members.sum(axis=1), np.cumsum((0, *observed.sources[:-1]))
    columns = [
        slice(start + band.start, start + min(band.stop, size))
        for start, size in zip(starts, observed.sources, strict=True)
        for band in bands_of(size)
    ]
    bands = [*(observed.features[:, some] for some in columns), observed.contexts]
    # Features that do not vary, e.g. those of a single context, are not informative.
    varying = [band if np.ptp(band, axis=0).any() else np.zeros_like(band) for band in bands]
    noise = observed.n_cells.mean() / np.maximum(observed.n_cells, 1)
    dual, scales = fit_kernels(deltas @ basis.T, noise, counts, members, varying, observed.blocks)
    weights = [scale / size_of(band) * dual.T @ band for scale, band in zip(scales, varying, strict=True)]
    of_features = np.zeros((rank, observed.features.shape[1]))
    for some, found in zip(columns, weights[:-1], strict=True):
        of_features[:, some] = found
    own = np.zeros((members.shape[1] + 1, rank))
    own[1:] = members.T @ dual
    return {
        "base": BASE * counts @ dual,
        "of_features": of_features,
        "own": own,
        "of_context": weights[-1],
        "basis": basis,
    }


def fit_spread(coefficients: np.ndarray, gains: np.ndarray, n_cells: np.ndarray) -> np.ndarray:
    """Return how the cell variance along each basis vector increases with the squared effect along it, shape (R,).

    Parameters
    ----------
    coefficients
        Training effects in the basis, shape (N, R).
    gains
        Variance of the perturbed cells along each basis vector, minus the variance of the controls, shape (N, R).
    n_cells
        Number of cells per effect, shape (N,).
    """
    squares, weights = np.square(coefficients), n_cells[:, None].astype(np.float64)
    size = (weights * np.square(squares)).sum(axis=0)
    return np.divide((weights * squares * gains).sum(axis=0), size, out=np.zeros_like(size), where=size > 0)


def shifted_cells(
    controls: np.ndarray, delta: np.ndarray, coefficients: np.ndarray, basis: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """Return perturbed cells: controls with the mean shifted by an effect and the variance along the basis adapted.

    The mean of each gene is the mean of the controls plus the effect, and at least 0. Genes whose mean increases are
    shifted; genes whose mean decreases are scaled, because expression cannot be negative.

    Parameters
    ----------
    controls
        log1p CP10K, shape (N, G).
    delta
        The effect, shape (G,).
    coefficients
        The effect in the basis, shape (R,).
    basis
        Orthonormal rows or zeros, shape (R, G).
    spread
        Result of :func:`fit_spread`, shape (R,).
    """
    mean = controls.mean(axis=0)
    along = (controls - mean) @ basis.T
    variance = along.var(axis=0)
    growth = np.divide(spread * np.square(coefficients), variance, out=np.zeros_like(variance), where=variance > 0)
    cells = np.maximum(controls + (along * (np.sqrt(np.maximum(1 + growth, 0.0)) - 1)) @ basis, 0.0)
    reached, wanted = cells.mean(axis=0), np.maximum(mean + delta, 0.0)
    falls = wanted < reached
    cells[:, falls] *= wanted[falls] / reached[falls]
    cells[:, ~falls] += (wanted - reached)[~falls]
    return cells
