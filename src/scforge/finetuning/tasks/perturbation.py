"""Prediction of cellular responses to perturbations, with baselines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData, concat
from scipy import sparse
from torch import nn

from scforge._checks import check_choice, check_count, check_known
from scforge._constants import PAD_ID, UNS_KEY
from scforge.data.cells import CellBlock, Cells, CellSource, choose_rows
from scforge.data.expression import log_expression
from scforge.data.perturbation import label_parts
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, listing
from scforge.eval.perturbation import N_COMPONENTS, KnownEffects, WantedEffects, baseline_effects, gene_scores
from scforge.eval.perturbation_metrics import (
    METRICS,
    calibrated,
    comparable,
    de_genes,
    score_deltas,
    technical_duplicate,
    warn_of_few,
)
from scforge.finetuning.base import Batch, Column, Evaluated, EvaluationContext, Loss, Predictor, Task, register_task
from scforge.finetuning.heads import FineTunedModule, check_head
from scforge.finetuning.labels import check_names
from scforge.finetuning.splits import Split
from scforge.finetuning.tasks._perturbation_model import (
    MAX_FEATURES,
    UNLABELED,
    BoundEffects,
    Conditions,
    Observed,
    Pair,
    PerturbationHead,
    blocks_of,
    fit_linear,
    fit_spread,
    gene_features,
    gene_vectors,
    hold_out,
    network_weight,
    shifted_cells,
)
from scforge.models._utils import evaluating
from scforge.perturbation.effects import Effects, effects_of, moments
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.gene_embedding import match_vectors, read_table
from scforge.training.objectives.base import TrainingDefaults
from scforge.training.predict import embed

logger = logging.getLogger("scforge")

MAX_INPUTS = 2048
"""Maximum number of controls per context for a prediction, which is averaged over them."""

_PROBED_CELLS = 256
"""Number of controls per context from which embeddings are standardized."""

_N_CELLS = 200
"""Default number of cells to predict per effect."""


def rows_by_context(conditions: Conditions, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return a mapping from context to rows, without contexts that have no rows."""
    found = {name: rows[conditions.context[rows] == code] for code, name in enumerate(conditions.contexts)}
    return {name: some for name, some in found.items() if len(some)}


def control_means(cells: Cells, controls: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the mean log1p CP10K of the controls of each context, float64, shape (G,)."""
    names = sorted(controls)
    rows = np.concatenate([controls[name] for name in names])
    codes = np.repeat(np.arange(len(names)), [len(controls[name]) for name in names])
    order = np.argsort(rows)
    return dict(zip(names, moments(cells, rows[order], codes[order], len(names)).mean, strict=True))


def measured_effects(
    conditions: Conditions, cells: Cells, scored: np.ndarray, pairs: Sequence[Pair], tested: Mapping[str, np.ndarray]
) -> tuple[Effects, np.ndarray, np.ndarray, np.ndarray]:
    """Measure the effects of `pairs` in the cells `scored`, relative to the controls `tested` of their context.

    Returns
    -------
    The effects, the rows of the cells used for them, the group of each of these cells (groups of controls follow the
    groups of the effects), and the group of the controls for each effect.
    """
    places = sorted({pair.context for pair in pairs})
    number = {pair: place for place, pair in enumerate(pairs)}
    of_cells = [
        number.get(Pair(conditions.targets[p], conditions.contexts[c]), -1)
        for p, c in zip(conditions.perturbation[scored], conditions.context[scored], strict=True)
    ]
    rows = np.concatenate([scored, *(tested[place] for place in places)])
    groups = np.concatenate(
        [of_cells, *(np.full(len(tested[place]), len(pairs) + i) for i, place in enumerate(places))]
    ).astype(np.int64)
    order = np.argsort(rows)
    order = order[groups[order] >= 0]
    rows, groups = rows[order], groups[order]
    controls = np.array([len(pairs) + places.index(pair.context) for pair in pairs])
    found = moments(cells, rows, groups, len(pairs) + len(places))
    return effects_of(found, np.arange(len(pairs)), controls), rows, groups, controls


def _divide_controls(
    conditions: Conditions, context: EvaluationContext, needed: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return, for each needed context, the controls used as inputs and those that effects are measured against."""
    controls = np.flatnonzero(conditions.controls)
    tested = rows_by_context(conditions, np.intersect1d(controls, context.rows))
    inputs = rows_by_context(conditions, np.setdiff1d(controls, context.rows))
    rng = np.random.default_rng(context.seed)
    few = [name for name in sorted(needed) if len(tested.get(name, ())) < (1 if name in inputs else 2)]
    if few:
        raise DataError(f"the contexts {listing(few)} have too few controls among the scored cells; add control cells.")
    for name in sorted(needed - {*inputs}):
        shuffled = rng.permutation(tested[name])
        inputs[name] = np.sort(shuffled[: len(shuffled) // 2])
        tested[name] = np.sort(shuffled[len(shuffled) // 2 :])
    inputs = {name: choose_rows(len(conditions.perturbation), MAX_INPUTS, rows=rows) for name, rows in inputs.items()}
    return inputs, tested


def _measured(predictor: Predictor) -> np.ndarray:
    """Return which genes were measured in the cells, bool, shape (G,)."""
    cells = predictor.cells
    assert cells.vocab is not None
    return np.ones(cells.vocab.n_genes, dtype=bool) if cells.measured is None else cells.measured


def _context_features(context: EvaluationContext, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return components of the mean control embedding of each context, from the model before fine-tuning."""
    predictor = context.predictor if context.base is None else context.base
    means = np.array([predictor.embedding(rows).mean(axis=0) for rows in inputs.values()], dtype=np.float64)
    left, values, _ = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    scores = (left * values)[:, :N_COMPONENTS]
    scale = max(float(scores.std()), 1e-12)
    return dict(zip(inputs, scores / scale, strict=True))


@register_task("perturbation")
class Perturbation(Task):
    """Predict the change in mean expression under unseen perturbations and combinations.

    The target is the change in mean log1p CP10K relative to the controls of the context. The prediction is a linear
    model of effects plus a network (:class:`PerturbationHead`). The linear model is a ridge regression on several
    sources of gene vectors: embeddings of the model, principal components of the training data, and `gene_tables`. If
    no source is informative, the linear model predicts the mean of the training effects. The input of the network is a
    control cell from the same context, resampled for each perturbed cell and epoch. The network weight is chosen on
    validation perturbations, and is 0 if the network does not improve their predictions; ``predict`` and ``evaluate``
    report it.

    Whole perturbations are held out, or whole contexts with ``split_by=context_key``. In held-out contexts, the
    perturbed cells are held out, but the controls are still inputs. Controls are split by cell. In each context, two
    thirds of the controls are used as inputs, and test effects are computed relative to the remaining third, so that
    predictions and test effects do not share the noise of the controls.

    If a target is not in the vocabulary, e.g. a drug, its vector comes only from its effects in the training set. The
    model can then predict its effect in other contexts and combinations, but only if the target is in the training set.

    Parameters
    ----------
    perturbation_key
        Column of ``obs`` with the perturbation of each cell, see ``scforge.data.perturbation.parse_perturbations``.
    control
        The label of control cells, e.g. ``"control"`` or ``"non-targeting"``.
    separator
        Separator between the parts of a combination. If None, labels are not split.
    context_key
        Column of ``obs`` with the context, e.g. the cell type or the batch. Cells are compared with the controls of
        their context. If None, cells are compared with all controls.
    heldout
        Perturbations to test on. If None, samples a fraction of `test_size`.
    heldout_contexts
        Contexts to test on instead of perturbations. If None, samples contexts if ``split_by=context_key``.
    delta_loss
        ``"mse"``, or ``"wmse"``: squared errors weighted by the differential expression of each gene under the
        perturbation, see :func:`scforge.eval.perturbation_metrics.de_weights`.
    rank
        Number of principal components of the training effects in which effects are predicted.
    head
        Network options, a dict with ``hidden_dim`` (0: linear) and ``dropout``.
    gene_tables
        A mapping from source name to a file with additional gene vectors, e.g. ``{"string": "string.parquet"}``, as for
        the tokenizer ``gene_embedding``. Sources are weighted by how well they predict held-out training effects.
    perturbations
        Perturbations in the training set, each with its contexts; determined from the training cells.
    """

    keys = ("perturbation_key", "context_key")
    makes_cells = True
    defaults = TrainingDefaults(batch_size=64, lr=1e-4, weight_decay=0.01, schedule="cosine_warmup", max_epochs=10)

    def __init__(
        self,
        *,
        perturbation_key: str,
        control: str,
        separator: str | None = "+",
        context_key: str | None = None,
        heldout: Sequence[str] | None = None,
        heldout_contexts: Sequence[str] | None = None,
        delta_loss: str = "mse",
        rank: int = 32,
        head: Mapping[str, Any] | None = None,
        gene_tables: Mapping[str, str] | None = None,
        perturbations: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.perturbation_key = perturbation_key
        self.control = control
        self.separator = separator
        self.context_key = context_key
        self.heldout = check_names("heldout", heldout)
        self.heldout_contexts = check_names("heldout_contexts", heldout_contexts)
        if self.heldout is not None and self.heldout_contexts is not None:
            raise OptionError("heldout and heldout_contexts cannot be combined; pass only one of them.")
        if self.heldout_contexts is not None and self.context_key is None:
            raise OptionError(f"heldout_contexts={self.heldout_contexts!r} requires context_key; pass context_key.")
        self.delta_loss = check_choice("delta_loss", delta_loss, ["mse", "wmse"])
        self.rank = check_count("rank", rank, "directions")
        self.head = check_head(head)
        self.gene_tables = None if gene_tables is None else {str(k): str(path) for k, path in gene_tables.items()}
        self.perturbations = None if perturbations is None else {k: list(v) for k, v in perturbations.items()}
        self._bound: BoundEffects
        self._genes: GeneVocab

    # --- cells

    def conditions(self, column: Column) -> Conditions:
        """Read the perturbation and context of each cell."""
        return Conditions.read(column, self.perturbation_key, self.control, self.separator, self.context_key)

    def usable(self, column: Column) -> np.ndarray:
        """Return which cells have a context, and are perturbed cells or controls."""
        return self.conditions(column).perturbation != UNLABELED

    def split(
        self, column: Column, *, validation_size: float, test_size: float, split_by: str | None, seed: int
    ) -> Split:
        """Hold out whole perturbations or contexts."""
        if split_by not in (None, self.perturbation_key, self.context_key):
            raise OptionError(f"split_by={split_by!r} must be the column of perturbation_key or context_key.")
        by_context = self.heldout_contexts is not None or (
            self.context_key is not None and split_by == self.context_key
        )
        if by_context and self.heldout is not None:
            raise OptionError(
                f"heldout={self.heldout!r} contains perturbations, but split_by={split_by!r} holds out contexts; omit "
                "one of the two."
            )
        named = self.heldout_contexts
        if not by_context and self.heldout is not None:
            named = [self.name_of(targets) for targets in self._targets_of("heldout", self.heldout)]
        vocab = self.vocab
        return hold_out(
            self.conditions(column),
            by_context=by_context,
            named=named,
            known=None if vocab is None else (lambda target: bool(vocab.gene_indices([target])[0] >= 0)),
            validation_size=validation_size,
            test_size=test_size,
            seed=seed,
        )

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the targets in the name of a perturbation."""
        found = label_parts(name, self.control, self.separator)
        return tuple(sorted({part for part in found if part and part != self.control}))

    def _targets_of(self, argument: str, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the targets of the given perturbations."""
        targets = [self.parts(name) for name in names]
        if () in targets:
            name = names[targets.index(())]
            raise OptionError(f"{argument} contains {name!r}, which is the control; remove it from {argument}.")
        return targets

    def name_of(self, targets: Sequence[str]) -> str:
        """Return the name of a perturbation."""
        return (self.separator or "+").join(targets)

    def options_from(self, column: Column) -> dict[str, Any]:
        """Return the perturbations of the training cells.

        Raises
        ------
        DataError
            If there are no perturbations.
        """
        conditions = self.conditions(column)
        found: dict[str, list[str]] = {}
        for targets, place in conditions.pairs(np.arange(len(conditions.perturbation))):
            found.setdefault(self.name_of(targets), []).append(place)
        if not found:
            raise DataError(f"all training cells are controls (control={self.control!r}); change the split.")
        return {"perturbations": found}

    @property
    def seen_targets(self) -> list[str]:
        """Targets in the training set, sorted."""
        names = self.perturbations or {}
        return sorted({target for name in names for target in self.parts(name)})

    def is_seen(self, targets: tuple[str, ...], context: str) -> bool:
        """Return whether a perturbation in a context is in the training set."""
        return context in (self.perturbations or {}).get(self.name_of(targets), ())

    def encode_targets(self, wanted: Sequence[tuple[str, ...]], vocab: GeneVocab) -> dict[str, torch.Tensor]:
        """Return the head inputs for perturbations: tokens and numbers of their targets, int64, shape (B, T).

        Raises
        ------
        OptionError
            If a target is neither a gene of the model nor in the training set.
        """
        numbers = {target: number for number, target in enumerate(self.seen_targets, start=1)}
        width = max(len(targets) for targets in wanted)
        tokens, own = (torch.zeros(len(wanted), width, dtype=torch.int64) for _ in range(2))
        unknown: set[str] = set()
        for row, targets in enumerate(wanted):
            for place, (target, gene) in enumerate(zip(targets, vocab.gene_indices(targets), strict=True)):
                own[row, place] = numbers.get(target, 0)
                tokens[row, place] = PAD_ID if gene < 0 else int(gene) + vocab.n_special
                if gene < 0 and target not in numbers:
                    unknown.add(target)
        if unknown:
            names = listing(sorted(unknown))
            raise OptionError(
                f"the targets {names} are not in the vocabulary of the model or in its training data; remove these "
                "targets."
            )
        return {"perturbed_tokens": tokens, "perturbed_targets": own}

    # --- the module

    def make_head(self, n_latent: int, module: nn.Module) -> PerturbationHead:
        """Create the head; see :class:`PerturbationHead`."""
        n_tokens, width = gene_vectors(module).shape
        options = {"hidden_dim": 64, "dropout": 0.1} | self.head
        n_features = sum(self._sources(width))
        return PerturbationHead(n_latent, n_tokens, n_features, len(self.seen_targets), self.rank, **options)

    def _sources(self, width: int) -> tuple[int, ...]:
        """Return the number of features from each source: gene embeddings, training effects, and tables."""
        return (min(MAX_FEATURES, width), N_COMPONENTS, *[MAX_FEATURES] * len(self.gene_tables or {}))

    def _features(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return gene features from all sources, float32, shape (V, F)."""
        bound, vocab = self._bound, self._genes
        pairs = bound.groups[bound.trained]
        effects = KnownEffects(
            targets=tuple(bound.conditions.targets[perturbation] for perturbation in pairs[:, 0]),
            contexts=tuple(bound.conditions.contexts[context] for context in pairs[:, 1]),
            deltas=bound.deltas[bound.trained].astype(np.float64),
            controls=dict(zip(bound.conditions.contexts, bound.controls, strict=True)),
        )
        scores = torch.zeros(len(vectors), N_COMPONENTS)
        found = torch.from_numpy(gene_scores(effects)).float()
        scores[vocab.n_special :, : found.shape[1]] = found
        parts = [gene_features(vectors, vocab.n_special, min(MAX_FEATURES, vectors.shape[1])).cpu(), scores]
        for table in (self.gene_tables or {}).values():
            matched = torch.from_numpy(match_vectors(*read_table(table), vocab))
            # Genes without a vector are at the mean, which is zero after centering.
            known = matched.isfinite().all(dim=1)
            matched = torch.where(known[:, None], matched, matched[known].mean(dim=0))
            parts.append(gene_features(matched, vocab.n_special, MAX_FEATURES))
        return torch.cat(parts, dim=1)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Measure effects, and keep controls as inputs."""
        assert cells.vocab is not None
        self._genes = cells.vocab
        conditions = self.conditions(cells.column)
        self._bound = BoundEffects(cells, conditions, train_rows, weighted=self.delta_loss == "wmse")
        targets = [conditions.targets[perturbation] for perturbation in self._bound.groups[:, 0]]
        self._encoded = self.encode_targets(targets, cells.vocab)
        features = (self._bound.controls - self._bound.center) @ self._bound.axes.T
        self._contexts = torch.from_numpy(features[self._bound.groups[:, 1]]).float()

    def initialize(self, module: FineTunedModule, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Fit the linear part of the head, and standardize embeddings."""
        bound, n_special = self._bound, self._genes.n_special
        head: PerturbationHead = module.head
        vectors = gene_vectors(module.encoder)
        head.features.copy_(self._features(vectors))
        chosen = np.concatenate([rows[:_PROBED_CELLS] for rows in bound.inputs])
        head.standardize.set_from(embed(module, bound.pool, tokenizer, objective=self, rows=chosen))
        head.context_center[n_special:] = torch.from_numpy(bound.center)
        head.context_axes[:, n_special:] = torch.from_numpy(bound.axes)
        trained = np.flatnonzero(bound.trained)
        members = np.zeros((len(trained), len(self.seen_targets)))
        numbers = self._encoded["perturbed_targets"][trained].numpy()
        rows, places = np.nonzero(numbers)
        members[rows, numbers[rows, places] - 1] = 1.0
        deltas = np.zeros((len(trained), head.basis.shape[1]))
        deltas[:, n_special:] = bound.deltas[trained]
        observed = Observed(
            deltas=deltas,
            n_cells=bound.n_cells[trained],
            members=members,
            features=head.features.cpu()[self._encoded["perturbed_tokens"][trained]].sum(dim=1).double().numpy(),
            sources=self._sources(vectors.shape[1]),
            contexts=self._contexts[trained].double().numpy(),
            blocks=blocks_of(bound.groups, bound.trained, by_context=self.heldout_contexts is not None),
        )
        found = fit_linear(observed, self.rank)
        basis = found["basis"][:, n_special:]
        gains = bound.variance_gains(basis)[trained]
        found["spread"] = fit_spread(bound.deltas[trained] @ basis.T, gains, observed.n_cells)
        for name, values in found.items():
            head.get_buffer(name).copy_(torch.from_numpy(values))

    # --- training

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> Batch:
        """Return a control for each perturbed cell and the effect to predict; control cells are skipped."""
        bound = self._bound
        rows = block.rows[bound.group[block.rows] >= 0]
        counted = np.ones(len(rows), dtype=np.float32)
        if not len(rows):
            # A batch needs a cell; this one does not count.
            rows, counted = np.flatnonzero(bound.group >= 0)[:1], np.zeros(1, dtype=np.float32)
        inputs = bound.pool.block(bound.draw(rows, epoch=epoch, seed=seed))
        tokens = self.arrange(tokenizer(inputs), tokenizer, inputs.rows, epoch=epoch, seed=seed)
        groups = bound.group[rows]
        return {
            **tokens,
            "perturbed_tokens": self._encoded["perturbed_tokens"][groups],
            "perturbed_targets": self._encoded["perturbed_targets"][groups],
            "perturbed_contexts": self._contexts[groups],
            "delta": torch.from_numpy(bound.deltas[groups]),
            "delta_weights": torch.from_numpy(bound.weights[groups]),
            "counted": torch.from_numpy(counted),
        }

    def n_cells(self, batch: Batch) -> int:
        """Return the number of perturbed cells."""
        return int(batch["counted"].sum())

    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Return the (weighted) mean squared error of effects, and their mean cosine similarity."""
        delta = batch["delta"]
        predicted = outputs[:, outputs.shape[1] - delta.shape[1] :].float()
        errors = (batch["delta_weights"] * (predicted - delta).square()).mean(dim=1)
        counted = batch["counted"]
        n_counted = counted.sum().clamp(min=1)
        cosine = nn.functional.cosine_similarity(predicted.detach(), delta, dim=1)
        return (errors * counted).sum() / n_counted, {"cosine": (cosine * counted).sum() / n_counted}

    # --- afterwards

    def calibrate(self, predictor: Predictor, rows: np.ndarray) -> None:
        """Choose the network weight on the perturbations of validation cells."""
        bound = self._bound
        groups = np.unique(bound.group[rows])
        groups = groups[groups >= 0]
        names = bound.conditions
        pairs = [Pair(names.targets[perturbation], names.contexts[context]) for perturbation, context in bound.groups]
        inputs = dict(zip(names.contexts, bound.inputs, strict=True))
        pool = replace(predictor, cells=bound.pool)
        means = dict(zip(names.contexts, bound.controls, strict=True))
        linear, network = self._parts(pool, [pairs[group] for group in groups], inputs, means)
        basis = predictor.module.head.basis[:, self._genes.n_special :].double().cpu().numpy()
        weight = network_weight(linear @ basis, network @ basis, bound.deltas[groups], bound.n_cells[groups])
        predictor.module.head.weight.fill_(weight)
        logger.info(f"Weight of the network, estimated from {len(groups)} validation effects: {weight:.2f}.")

    @torch.inference_mode()
    def _parts(
        self,
        predictor: Predictor,
        pairs: Sequence[Pair],
        inputs: Mapping[str, np.ndarray],
        means: Mapping[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return linear and network parts of effects in the basis, averaged over inputs, float64, shape (Q, R) each."""
        vocab = predictor.cells.vocab
        assert vocab is not None
        encoded = self.encode_targets([pair.targets for pair in pairs], vocab)
        head: PerturbationHead = predictor.module.head
        device = head.basis.device
        linear, network = np.empty((2, len(pairs), len(head.basis)))
        with evaluating(head):
            for place in sorted({pair.context for pair in pairs}):
                z_bd = torch.from_numpy(predictor.embedding(inputs[place])).to(device)
                features = head.context_features(means[place][None])
                for row in (i for i, pair in enumerate(pairs) if pair.context == place):
                    parts = (*(value[row : row + 1] for value in encoded.values()), features)
                    c_br = head.linear(*(part.to(device) for part in parts))
                    linear[row] = c_br[0].cpu().numpy()
                    network[row] = head.network(z_bd, c_br.expand(len(z_bd), -1)).mean(dim=0).cpu().numpy()
        return linear, network

    def _coefficients(
        self,
        predictor: Predictor,
        pairs: Sequence[Pair],
        inputs: Mapping[str, np.ndarray],
        means: Mapping[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return predicted effects in the basis, float64, shape (Q, R), and the basis, shape (R, G)."""
        linear, network = self._parts(predictor, pairs, inputs, means)
        head: PerturbationHead = predictor.module.head
        n_special = len(head.context_center) - len(next(iter(means.values())))
        return linear + float(head.weight) * network, head.basis[:, n_special:].double().cpu().numpy()

    def _wanted(
        self,
        conditions: Conditions,
        controls: Mapping[str, np.ndarray],
        perturbations: Sequence[str] | None,
        contexts: Sequence[str] | None,
    ) -> list[Pair]:
        """Return the effects to predict, each once."""
        for name in contexts or ():
            check_known("contexts", name, controls, "the contexts with control cells", error=OptionError)
        if perturbations is not None:
            targets = self._targets_of("perturbations", check_names("perturbations", perturbations) or [])
            return list(dict.fromkeys(Pair(some, place) for some in targets for place in contexts or controls))
        pairs = [
            pair
            for pair in conditions.pairs(np.arange(len(conditions.perturbation)))
            if not self.is_seen(*pair) and (contexts is None or pair.context in contexts)
        ]
        if not pairs:
            raise OptionError(
                "perturbations=None, but the model was trained on every perturbation in these cells; pass the "
                "perturbations to predict."
            )
        if without := sorted({pair.context for pair in pairs} - {*controls}):
            raise DataError(f"the contexts {listing(without)} have no control cells to predict from; add controls.")
        return pairs

    def predict(  # type: ignore[override]
        self,
        predictor: Predictor,
        adata: AnnData | None,
        *,
        key_added: str | None = None,
        perturbations: Sequence[str] | None = None,
        contexts: Sequence[str] | None = None,
        n_cells: int | None = None,
        single_cells: bool = False,
    ) -> AnnData:
        """Predict mean expression, or cells, under perturbations.

        Parameters
        ----------
        predictor
            The model applied to cells, whose controls are the inputs.
        adata, key_added
            Unused: nothing is written.
        perturbations
            Names of perturbations, with combinations joined by `separator`. If None, uses the perturbations of the
            cells that the model was not trained on.
        contexts
            Names of contexts. If None, uses the contexts in which the perturbations occur in the cells, or all contexts
            with controls if `perturbations` is given.
        n_cells
            Maximum number of controls per context from which effects are predicted. If None, uses up to 2,048, or 200
            with `single_cells`.
        single_cells
            Whether to return one row per predicted cell. Each is a control cell whose expression is changed such that
            the mean over cells is the predicted mean. Along each basis vector of the effects, the variance changes as
            for training effects of that size.

        Returns
        -------
        With `single_cells`, log1p CP10K of predicted cells over the measured genes (CSR, float32), with
        `perturbation_key` and `context_key` in ``obs``, as expected by :func:`~scforge.eval.evaluate_perturbations`.
        Otherwise, one row for each perturbation in each context, over the genes of the model. ``X`` is the predicted
        mean log1p CP10K (float32): the mean of the controls plus the effect, at least 0, and NaN for genes that the
        cells lack. ``layers["delta"]`` is the effect, for all genes. ``obs`` contains ``perturbation``, ``context``,
        ``n_controls`` and ``is_seen`` (in the training set), ``var`` contains ``measured``, and
        ``uns["scforge"]["predicted"]`` contains the units and the network weight.

        Raises
        ------
        OptionError
            If a name is unknown, or no effect is left to predict.
        DataError
            If there are no controls, or the column `perturbation_key` is missing.
        """
        if key_added is not None:
            raise OptionError(
                f"key_added={key_added!r} has no effect, because 'perturbation' returns an AnnData; omit key_added."
            )
        if n_cells is not None:
            check_count("n_cells", n_cells, "controls")
        cells = predictor.cells
        assert cells.vocab is not None
        key, columns = self.perturbation_key, getattr(cells, "obs", None)
        fix = f"if no cell is perturbed, set adata.obs[{key!r}] = {self.control!r}"
        check_known("perturbation_key", key, () if columns is None else columns, "obs", fix=fix)
        conditions = self.conditions(cells.column)
        controls = rows_by_context(conditions, np.flatnonzero(conditions.controls))
        pairs = self._wanted(conditions, controls, perturbations, contexts)
        most = n_cells or (_N_CELLS if single_cells else MAX_INPUTS)
        used = {
            name: choose_rows(len(cells), most, rows=controls[name])
            for name in sorted({pair.context for pair in pairs})
        }
        measured = _measured(predictor)
        means = {name: np.where(measured, mean, np.nan) for name, mean in control_means(cells, controls).items()}
        coefficients, basis = self._coefficients(predictor, pairs, used, means)
        if single_cells:
            return self._cells_of(predictor, pairs, used, coefficients, basis)
        deltas = coefficients @ basis
        absolute = np.maximum(np.array([means[pair.context] for pair in pairs]) + deltas, 0.0)
        names = [self.name_of(pair.targets) for pair in pairs]
        obs = pd.DataFrame(
            {
                "perturbation": pd.Categorical(names),
                "context": pd.Categorical([pair.context for pair in pairs]),
                "n_controls": [len(used[pair.context]) for pair in pairs],
                "is_seen": [self.is_seen(*pair) for pair in pairs],
            },
            index=names,
        )
        if self.context_key is not None:
            obs.index = [f"{name} in {pair.context}" for name, pair in zip(names, pairs, strict=True)]
        var = pd.DataFrame({"measured": measured}, index=list(cells.vocab.genes))
        made = AnnData(absolute.astype(np.float32), obs=obs, var=var)
        made.layers["delta"] = deltas.astype(np.float32)
        made.uns[UNS_KEY] = {
            "predicted": {
                "X": "mean of log1p of counts per 10,000",
                "delta": "difference of X to the controls of the context",
                "control": self.control,
                "perturbation_key": self.perturbation_key,
                "network_weight": float(predictor.module.head.weight),
            }
        }
        return made

    def _cells_of(
        self,
        predictor: Predictor,
        pairs: Sequence[Pair],
        used: Mapping[str, np.ndarray],
        coefficients: np.ndarray,
        basis: np.ndarray,
    ) -> AnnData:
        """Return predicted cells of each effect, from the controls `used`."""
        cells, measured = predictor.cells, _measured(predictor)
        assert cells.vocab is not None
        spread = predictor.module.head.spread.double().cpu().numpy()
        controls = {name: log_expression(cells, rows).toarray().astype(np.float64) for name, rows in used.items()}
        var = pd.DataFrame(index=np.array(cells.vocab.genes, dtype=object)[measured])
        made: list[AnnData] = []
        for pair, own in zip(pairs, coefficients, strict=True):
            moved = shifted_cells(controls[pair.context], own @ basis, own, basis, spread)[:, measured]
            obs = pd.DataFrame({self.perturbation_key: [self.name_of(pair.targets)] * len(moved)})
            if self.context_key is not None:
                obs[self.context_key] = pair.context
            obs.index = [f"predicted {len(made)}-{row}" for row in range(len(moved))]
            made.append(AnnData(sparse.csr_matrix(moved, dtype=np.float32), obs=obs, var=var))
        return concat(made)

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score the mean effects of perturbations that the model was not trained on.

        Effects are measured against the controls among the scored cells. The other controls of the same data are the
        inputs of the model. If a context has no other controls, half of its controls are inputs.

        Returns
        -------
        Each metric of :func:`~scforge.eval.perturbation_metrics.score_deltas`, averaged over perturbations, for the
        model, each of :func:`~scforge.eval.perturbation.baseline_effects`, and ``technical_duplicate``. Additional
        tables are ``per_perturbation`` and ``calibrated`` (0: the mean of the training effects, 1: the duplicate; over
        the effects that have enough cells for a duplicate). Without baselines, the table contains only the model,
        ``no_change``, and ``train_mean`` if the training cells are available.

        Raises
        ------
        DataError
            If no scored cell has a perturbation that the model was not trained on, or there are too few controls.

        Warns
        -----
        ScforgeWarning
            If fewer than ten effects are scored.
        """
        cells = context.predictor.cells
        conditions = self.conditions(cells.column)
        scored = context.rows[conditions.perturbation[context.rows] >= 0]
        pairs = [pair for pair in conditions.pairs(scored) if not self.is_seen(*pair)]
        if not pairs:
            raise DataError("the scored cells have no unseen perturbation; hold out perturbations (heldout=[...]).")
        inputs, tested = _divide_controls(conditions, context, {pair.context for pair in pairs})
        measured, rows, groups, controls = measured_effects(conditions, cells, scored, pairs, tested)
        genes = _measured(context.predictor)
        seen, means = genes, control_means(cells, inputs)
        means = {name: np.where(seen, mean, np.nan) for name, mean in means.items()}
        coefficients, basis = self._coefficients(context.predictor, pairs, inputs, means)
        predictions, trained = {"scforge": coefficients @ basis}, None
        if context.train is None:
            predictions["no_change"] = np.zeros((len(pairs), len(genes)))
        else:
            genes = genes & _measured(context.train)
            known = self._known(context, context.train, inputs)
            predictions |= self._baselines(context, context.train, known, pairs, inputs)
            place = np.cumsum(_measured(context.train)) - 1
            trained = known.deltas[:, place[genes]], known.contexts
        predictions = {name: made[:, genes] for name, made in predictions.items()}
        effects, scores = measured.deltas[:, genes], measured.scores[:, genes]
        changed = de_genes(measured.p_values[:, genes])
        warn_of_few(len(pairs))
        center = predictions.get("train_mean")
        places = [pair.context for pair in pairs]
        tables = {
            name: score_deltas(made, effects, scores, changed, center, places, trained)
            for name, made in predictions.items()
        }
        expression = log_expression(cells, rows)[:, genes]
        tables["technical_duplicate"] = technical_duplicate(
            expression, groups, controls, center, places, trained, seed=context.seed
        )
        described = pd.DataFrame(
            {
                "perturbation": [self.name_of(pair.targets) for pair in pairs],
                "context": places,
                "n_cells": measured.n_cells,
                "n_controls": measured.n_controls,
            }
        )
        metrics = pd.DataFrame({name: table.mean() for name, table in tables.items()}).T[list(METRICS)]
        whole = [pd.concat([described.assign(method=name), table], axis=1) for name, table in tables.items()]
        found = {"per_perturbation": pd.concat(whole, ignore_index=True)}
        found["network"] = pd.DataFrame({"weight": [float(context.predictor.module.head.weight)]}, index=["scforge"])
        if "train_mean" in metrics.index:
            same = comparable(found["per_perturbation"], "technical_duplicate")
            means = same.groupby("method")[list(METRICS)].mean().reindex(metrics.index)
            found["calibrated"] = calibrated(means, "train_mean", "technical_duplicate")
        return Evaluated(metrics, found)

    def _baselines(
        self,
        context: EvaluationContext,
        train: Predictor,
        known: KnownEffects,
        pairs: Sequence[Pair],
        inputs: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return the effects predicted by baselines, shape (Q, G); 0 for genes missing in the training cells."""
        trained = np.flatnonzero(_measured(train))
        vocab = train.cells.vocab
        assert vocab is not None
        targets = sorted({target for some in (*known.targets, *(pair.targets for pair in pairs)) for target in some})
        # A baseline knows what the training tells of a gene, also where the scored data lack it.
        number = {int(gene): place for place, gene in enumerate(trained)}
        indices = {target: int(index) for target, index in zip(targets, vocab.gene_indices(targets), strict=True)}
        head: PerturbationHead = context.predictor.module.head
        features = head.features[vocab.n_special :, :N_COMPONENTS].cpu().numpy().astype(np.float64)
        spread = features.std(axis=0)
        # In units of their spread: the penalty of the linear model is for features of that size.
        features = np.divide(features, spread, out=np.zeros_like(features), where=spread > 0)
        wanted = WantedEffects(
            targets=tuple(pair.targets for pair in pairs),
            contexts=tuple(pair.context for pair in pairs),
            genes={target: number[index] for target, index in indices.items() if index in number},
            gene_features={target: features[index] for target, index in indices.items() if index >= 0},
            context_features=_context_features(context, inputs) if self.context_key is not None else {},
        )
        found = {}
        for name, made in baseline_effects(known, wanted, fitted=context.baselines).items():
            found[name] = np.zeros((len(pairs), vocab.n_genes))
            found[name][:, trained] = made
        return found

    def _known(self, context: EvaluationContext, train: Predictor, inputs: Mapping[str, np.ndarray]) -> KnownEffects:
        """Measure the effects in the training cells only, over all genes measured in these cells."""
        assert context.train_rows is not None
        cells, rows, genes = train.cells, context.train_rows, _measured(train)
        conditions = self.conditions(cells.column)
        controls = rows_by_context(conditions, rows[conditions.controls[rows]])
        pairs = conditions.pairs(rows)
        effects, *_ = measured_effects(conditions, cells, rows[conditions.perturbation[rows] >= 0], pairs, controls)
        means = control_means(cells, controls)
        if elsewhere := {name: some for name, some in inputs.items() if name not in means}:
            scored = control_means(context.predictor.cells, elsewhere)
            seen = _measured(context.predictor)
            means |= {name: np.where(seen, mean, np.nan) for name, mean in scored.items()}
        return KnownEffects(
            targets=tuple(pair.targets for pair in pairs),
            contexts=tuple(pair.context for pair in pairs),
            deltas=effects.deltas[:, genes],
            controls={name: mean[genes] for name, mean in means.items()},
            n_cells=effects.n_cells,
        )
