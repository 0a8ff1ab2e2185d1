"""The fine-tuned predictor: its training effects, the fit of its linear part, and the network.

Shapes: N effects or cells, Q effects, C contexts, B batch, T targets, V tokens, G genes, F gene features, R basis,
D embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn

from scforge._constants import PAD_ID
from scforge.data.cells import Cells, choose_rows
from scforge.data.expression import log_expression
from scforge.data.sampling import cell_keys
from scforge.errors import DataError, OptionError, listing
from scforge.models.components.gene_vectors import GeneVectorEmbedding
from scforge.models.components.heads import Standardize
from scforge.perturbation.effects import Conditions, effects_of, moments, moments_of
from scforge.perturbation.kernels import BANDS, BASE, N_COMPONENTS, bands_of, fit_kernels, mean_square_length
from scforge.perturbation.keys import Effect, PerturbationKeys
from scforge.perturbation.metrics import de_weights

MAX_FEATURES = BANDS[-1]
"""Number of components from a source of gene vectors."""

_MAX_CONTROLS = 2048
"""Number of controls per context from which inputs are sampled."""

_BLOCK = 4096
"""Number of cells that are read at once."""

_STREAM = 0x6374726C  # "ctrl"

_SMALLEST = 1e-10
"""Fraction of the largest singular value below which singular values count as zero."""


class TrainingEffects:
    """Effects in the cells of a training run, and its controls.

    Each effect belongs either to training cells or to held-out cells, never to both.

    Attributes
    ----------
    conditions
        Conditions of all cells.
    group
        Index of the effect that a cell belongs to, -1 if there is none, int64, shape (N,).
    trained
        Whether each effect belongs to training cells, bool, shape (Q,).
    deltas
        Change in mean log1p CP10K relative to the training controls of the context, float32, shape (Q, G).
    weights
        Gene weights in the error of each effect, float32, shape (Q, G).
    n_cells
        Number of cells per effect, int64, shape (Q,).
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

    def __init__(
        self, cells: Cells, conditions: Conditions, keys: PerturbationKeys, train_rows: np.ndarray, *, weighted: bool
    ) -> None:
        self.conditions = conditions
        effects, n_effects, perturbed = conditions.effects, len(conditions.effects), conditions.is_perturbed
        in_training = np.zeros(len(cells), dtype=bool)
        in_training[train_rows] = True
        n_trained, n_cells = (
            np.bincount(conditions.groups[perturbed & part], minlength=n_effects) for part in (in_training, True)
        )
        if partly := {keys.label(effects[i].targets) for i in np.flatnonzero((n_trained > 0) & (n_trained < n_cells))}:
            raise OptionError(
                f"the split separates cells of the same perturbation ({listing(sorted(partly))}); hold out whole "
                "perturbations, e.g. by omitting split_key."
            )
        self.trained = n_trained > 0
        if not self.trained.any():
            raise DataError("no training cell is perturbed, so there is no effect to learn; change the split.")
        controls = conditions.control_rows(np.flatnonzero(in_training))
        if without := sorted({effect.context for effect in effects} - {*controls}):
            raise DataError(
                f"the contexts {listing(without)} have no training controls to measure effects against; change "
                "the split."
            )
        self.group = np.where(perturbed, conditions.groups, -1)
        self._cells, self._rows = cells, np.flatnonzero(perturbed | (in_training & (conditions.groups >= n_effects)))
        groups = moments(cells, self._rows, conditions.groups[self._rows], n_effects + len(conditions.contexts))
        measured = effects_of(groups, np.arange(n_effects), conditions.controls)
        self.deltas, self.n_cells = measured.deltas.astype(np.float32), measured.n_cells
        self.controls = groups.mean[n_effects:]
        means = self.controls[groups.n[n_effects:] > 0]
        self.center, self.axes = means.mean(axis=0), np.zeros((N_COMPONENTS, means.shape[1]))
        _, values, axes = np.linalg.svd(means - self.center, full_matrices=False)
        n_comps = min(N_COMPONENTS, int((values > _SMALLEST * max(values[0], _SMALLEST)).sum()))
        self.axes[:n_comps] = axes[:n_comps]
        seen = np.ones(means.shape[1], dtype=bool) if cells.measured is None else cells.measured
        self.weights = np.zeros(measured.deltas.shape, dtype=np.float32)
        self.weights[:, seen] = de_weights(measured.scores[:, seen]) if weighted else 1.0
        self.weights /= self.weights.mean(axis=1, keepdims=True)
        chosen = {name: choose_rows(len(cells), _MAX_CONTROLS, rows=rows) for name, rows in controls.items()}
        pooled = np.sort(np.concatenate([*chosen.values()]))
        self.pool = cells.sample(len(pooled), rows=pooled)
        self.inputs = {name: np.searchsorted(pooled, rows) for name, rows in chosen.items()}

    def variance_gains(self, basis: np.ndarray) -> np.ndarray:
        """Return the variance of perturbed cells along each basis vector, minus the control variance, shape (Q, R)."""
        conditions, n_effects = self.conditions, len(self.conditions.effects)
        pieces = [self._rows[start : start + _BLOCK] for start in range(0, len(self._rows), _BLOCK)]
        scores = np.concatenate([log_expression(self._cells, rows) @ basis.T for rows in pieces])
        n_groups = n_effects + len(conditions.contexts)
        variance = moments_of(sparse.csr_matrix(scores), conditions.groups[self._rows], n_groups).variance
        return variance[:n_effects] - variance[conditions.controls]

    def draw(self, rows: np.ndarray, *, epoch: int, seed: int) -> np.ndarray:
        """Return a random training control from the context of each perturbed cell, as pool rows, shape (B,)."""
        keys = cell_keys(rows, seed=seed, epoch=epoch, stream=_STREAM)
        contexts = self.conditions.controls[self.group[rows]] - len(self.conditions.effects)
        drawn = np.empty(len(rows), dtype=np.int64)
        for context in np.unique(contexts):
            here = contexts == context
            candidates = self.inputs[self.conditions.contexts[context]]
            drawn[here] = candidates[(keys[here] % np.uint64(len(candidates))).astype(np.int64)]
        return drawn


def blocks_of(effects: Sequence[Effect], trained: np.ndarray, *, by_context: bool) -> np.ndarray:
    """Return the blocks that are left out together to compare scales: perturbations or contexts, as in the split.

    Parameters
    ----------
    effects
        The Q effects.
    trained
        Whether each effect is used for training, bool, shape (Q,).
    by_context
        Whether contexts were held out by name. If False, contexts count as held out if a held-out perturbation occurs
        in training in another context.

    Returns
    -------
    Block of each of the N trained effects, integers, shape (N,). If training contains only one unit of the held-out
    kind, e.g. one context, blocks are units of the other kind, e.g. perturbations.
    """
    seen = [effect for effect, is_trained in zip(effects, trained, strict=True) if is_trained]
    names = {effect.targets for effect in seen}, {effect.context for effect in seen}
    unseen = {effect.targets for effect, is_trained in zip(effects, trained, strict=True) if not is_trained}
    axis = int(by_context or bool(unseen & names[0]))
    if len(names[axis]) < 2 <= len(names[1 - axis]):
        axis = 1 - axis
    numbers = {name: number for number, name in enumerate(sorted(names[axis]))}
    return np.array([numbers[effect[axis]] for effect in seen])


def fit_linear(
    deltas: np.ndarray,
    n_cells: np.ndarray,
    members: np.ndarray,
    features: np.ndarray,
    sources: Sequence[int],
    contexts: np.ndarray,
    blocks: np.ndarray,
    rank: int,
) -> dict[str, np.ndarray]:
    """Fit the linear part of the head, and return a mapping from buffer name to values.

    The basis consists of the principal components of the effects, without centering. In this basis,
    :func:`~scforge.perturbation.kernels.fit_kernels` regresses the effects on the number of targets, the targets, their
    features in bands, and the context. A model without informative features predicts the mean.

    Parameters
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
    rank
        Rank R of the basis; rows are zero if there are fewer effects.
    """
    deltas = deltas.astype(np.float64)
    _, values, axes = np.linalg.svd(deltas, full_matrices=False)
    kept = int((values[:rank] > _SMALLEST * max(values[0], _SMALLEST)).sum())
    basis = np.zeros((rank, deltas.shape[1]))
    basis[:kept] = axes[:kept]
    counts, starts = members.sum(axis=1), np.cumsum((0, *sources[:-1]))
    columns = [
        slice(start + band.start, start + min(band.stop, size))
        for start, size in zip(starts, sources, strict=True)
        for band in bands_of(size)
    ]
    bands = [*(features[:, band] for band in columns), contexts]
    # Features that do not vary, e.g. those of a single context, are not informative.
    bands = [band if np.ptp(band, axis=0).any() else np.zeros_like(band) for band in bands]
    noise = n_cells.mean() / np.maximum(n_cells, 1)
    dual, scales = fit_kernels(deltas @ basis.T, noise, counts, members, bands, blocks)
    weights = [scale / mean_square_length(band) * dual.T @ band for scale, band in zip(scales, bands, strict=True)]
    of_features = np.zeros((rank, features.shape[1]))
    for band, weight in zip(columns, weights[:-1], strict=True):
        of_features[:, band] = weight
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
