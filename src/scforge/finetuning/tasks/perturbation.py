"""Prediction of cellular responses to perturbations, with baselines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, listing, suggest
from scforge.finetuning.base import Batch, Column, Evaluated, EvaluationContext, Loss, Predictor, Task, register_task
from scforge.finetuning.heads import check_head
from scforge.finetuning.labels import check_names
from scforge.finetuning.mapping import FineTunedModule
from scforge.finetuning.splits import Split
from scforge.models._utils import evaluating
from scforge.perturbation.baselines import baseline_effects, gene_scores
from scforge.perturbation.effects import Conditions, KnownEffects, WantedEffects, control_means, measured_effects
from scforge.perturbation.kernels import N_COMPONENTS
from scforge.perturbation.keys import Effect, PerturbationKeys
from scforge.perturbation.metrics import (
    METRICS,
    TECHNICAL_DUPLICATE,
    calibrated,
    comparable,
    de_genes,
    score_deltas,
    technical_duplicate,
    warn_of_few,
)
from scforge.perturbation.model import (
    MAX_FEATURES,
    PerturbationHead,
    TrainingEffects,
    blocks_of,
    fit_linear,
    fit_spread,
    gene_features,
    gene_vectors,
    network_weight,
    shifted_cells,
)
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

_TEST_CONTROLS = 1 / 3


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
        Column of ``obs`` with the perturbation of each cell, see ``scforge.perturbation.parse_perturbations``.
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
        perturbation, see :func:`scforge.perturbation.metrics.de_weights`.
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
            raise OptionError("and heldout_contexts cannot be combined; pass only one of them.", argument="heldout")
        if self.heldout_contexts is not None and self.context_key is None:
            raise OptionError("requires context_key; pass context_key.", heldout_contexts=self.heldout_contexts)
        self.delta_loss = check_choice("delta_loss", delta_loss, ["mse", "wmse"])
        self.rank = check_count("rank", rank, "directions")
        self.head = check_head(head)
        self.gene_tables = None if gene_tables is None else {str(k): str(path) for k, path in gene_tables.items()}
        self.perturbations = None if perturbations is None else {k: list(v) for k, v in perturbations.items()}
        self._keys = PerturbationKeys(perturbation_key, control, separator, context_key)
        self._bound: TrainingEffects
        self._genes: GeneVocab

    # --- cells

    def conditions(self, column: Column) -> Conditions:
        """Read the perturbation and context of each cell."""
        return Conditions.from_columns(column, self._keys)

    def usable(self, column: Column) -> np.ndarray:
        """Return which cells have a context, and are perturbed cells or controls."""
        return self.conditions(column).groups >= 0

    def split(
        self, column: Column, *, validation_size: float, test_size: float, split_by: str | None, seed: int
    ) -> Split:
        """Hold out whole perturbations or contexts."""
        if split_by not in (None, self.perturbation_key, self.context_key):
            raise OptionError("must be the column of perturbation_key or context_key.", split_by=split_by)
        by_context = self.heldout_contexts is not None or (
            self.context_key is not None and split_by == self.context_key
        )
        if by_context and self.heldout is not None:
            raise OptionError(
                f"contains perturbations, but split_by={split_by!r} holds out contexts; omit one of the two.",
                heldout=self.heldout,
            )
        named = self.heldout_contexts
        if not by_context and self.heldout is not None:
            named = [self._keys.label(targets) for targets in self._parse_targets("heldout", self.heldout)]
        vocab = self.vocab
        return hold_out(
            self.conditions(column),
            self._keys,
            by_context=by_context,
            named=named,
            known=None if vocab is None else (lambda target: bool(vocab.gene_indices([target])[0] >= 0)),
            validation_size=validation_size,
            test_size=test_size,
            seed=seed,
        )

    def _parse_targets(self, argument: str, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the targets of the given perturbations."""
        targets = [self._keys.targets(name) for name in names]
        if () in targets:
            name = names[targets.index(())]
            raise OptionError(f"contains {name!r}, which is the control; remove it from {argument}.", argument=argument)
        return targets

    def options_from(self, column: Column) -> dict[str, Any]:
        """Return the perturbations of the training cells.

        Raises
        ------
        DataError
            If there are no perturbations.
        """
        perturbations: dict[str, list[str]] = {}
        for targets, context in self.conditions(column).effects:
            perturbations.setdefault(self._keys.label(targets), []).append(context)
        if not perturbations:
            raise DataError(f"all training cells are controls (control={self.control!r}); change the split.")
        return {"perturbations": perturbations}

    @property
    def seen_targets(self) -> list[str]:
        """Targets in the training set, sorted."""
        return sorted({target for name in self.perturbations or {} for target in self._keys.targets(name)})

    def is_seen(self, targets: tuple[str, ...], context: str) -> bool:
        """Return whether a perturbation in a context is in the training set."""
        return context in (self.perturbations or {}).get(self._keys.label(targets), ())

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
            for position, (target, gene) in enumerate(zip(targets, vocab.gene_indices(targets), strict=True)):
                own[row, position] = numbers.get(target, 0)
                tokens[row, position] = PAD_ID if gene < 0 else int(gene) + vocab.n_special
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
        effects = [bound.conditions.effects[i] for i in np.flatnonzero(bound.trained)]
        controls = dict(zip(bound.conditions.contexts, bound.controls, strict=True))
        components = gene_scores(KnownEffects(effects, bound.deltas[bound.trained].astype(np.float64), controls))
        scores = torch.zeros(len(vectors), N_COMPONENTS)
        scores[vocab.n_special :, : components.shape[1]] = torch.from_numpy(components)
        parts = [gene_features(vectors, vocab.n_special, min(MAX_FEATURES, vectors.shape[1])).cpu(), scores]
        for table in (self.gene_tables or {}).values():
            matched = torch.from_numpy(match_vectors(*read_table(table), vocab))
            # Genes without a vector are at the mean, which is zero after centering.
            has_vector = matched.isfinite().all(dim=1)
            matched = torch.where(has_vector[:, None], matched, matched[has_vector].mean(dim=0))
            parts.append(gene_features(matched, vocab.n_special, MAX_FEATURES))
        return torch.cat(parts, dim=1)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Measure effects, and keep controls as inputs."""
        vocab: Any = cells.vocab
        self._genes = vocab
        conditions = self.conditions(cells.column)
        self._bound = TrainingEffects(cells, conditions, self._keys, train_rows, weighted=self.delta_loss == "wmse")
        self._encoded = self.encode_targets([effect.targets for effect in conditions.effects], vocab)
        features = (self._bound.controls - self._bound.center) @ self._bound.axes.T
        self._contexts = torch.from_numpy(features[conditions.controls - len(conditions.effects)]).float()

    def initialize(self, module: FineTunedModule, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Fit the linear part of the head, and standardize embeddings."""
        bound, n_special = self._bound, self._genes.n_special
        head: PerturbationHead = module.head
        vectors = gene_vectors(module.encoder)
        head.features.copy_(self._features(vectors))
        chosen = np.concatenate([rows[:_PROBED_CELLS] for rows in bound.inputs.values()])
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
        n_cells = bound.n_cells[trained]
        buffers = fit_linear(
            deltas,
            n_cells,
            members,
            features=head.features.cpu()[self._encoded["perturbed_tokens"][trained]].sum(dim=1).double().numpy(),
            sources=self._sources(vectors.shape[1]),
            contexts=self._contexts[trained].double().numpy(),
            blocks=blocks_of(bound.conditions.effects, bound.trained, by_context=self.heldout_contexts is not None),
            rank=self.rank,
        )
        basis = buffers["basis"][:, n_special:]
        buffers["spread"] = fit_spread(bound.deltas[trained] @ basis.T, bound.variance_gains(basis)[trained], n_cells)
        for name, values in buffers.items():
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
        bound, conditions = self._bound, self._bound.conditions
        groups = np.unique(bound.group[rows])
        groups = groups[groups >= 0]
        pool = replace(predictor, cells=bound.pool)
        means = dict(zip(conditions.contexts, bound.controls, strict=True))
        linear, network, basis = self._parts(pool, [conditions.effects[i] for i in groups], bound.inputs, means)
        weight = network_weight(linear @ basis, network @ basis, bound.deltas[groups], bound.n_cells[groups])
        predictor.module.head.weight.fill_(weight)
        logger.info(f"Weight of the network, estimated from {len(groups)} validation effects: {weight:.2f}.")

    @torch.inference_mode()
    def _parts(
        self,
        predictor: Predictor,
        effects: Sequence[Effect],
        inputs: Mapping[str, np.ndarray],
        means: Mapping[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return linear and network parts of effects in the basis, averaged over inputs, and the basis.

        Arrays are float64, of shape (Q, R), (Q, R) and (R, G).
        """
        vocab: Any = predictor.cells.vocab
        encoded = self.encode_targets([effect.targets for effect in effects], vocab)
        head: PerturbationHead = predictor.module.head
        device = head.basis.device
        linear, network = np.empty((2, len(effects), len(head.basis)))
        with evaluating(head):
            for context in sorted({effect.context for effect in effects}):
                z_bd = torch.from_numpy(predictor.embedding(inputs[context])).to(device)
                features = head.context_features(means[context][None])
                for row in (i for i, effect in enumerate(effects) if effect.context == context):
                    parts = (*(value[row : row + 1] for value in encoded.values()), features)
                    c_br = head.linear(*(part.to(device) for part in parts))
                    linear[row] = c_br[0].cpu().numpy()
                    network[row] = head.network(z_bd, c_br.expand(len(z_bd), -1)).mean(dim=0).cpu().numpy()
        return linear, network, head.basis[:, vocab.n_special :].double().cpu().numpy()

    def _wanted(
        self,
        conditions: Conditions,
        controls: Mapping[str, np.ndarray],
        perturbations: Sequence[str] | None,
        contexts: Sequence[str] | None,
    ) -> list[Effect]:
        """Return the effects to predict, each once."""
        for name in contexts or ():
            check_known("contexts", name, controls, "the contexts with control cells", error=OptionError)
        if perturbations is not None:
            targets = self._parse_targets("perturbations", check_names("perturbations", perturbations) or [])
            return list(dict.fromkeys(Effect(group, context) for group in targets for context in contexts or controls))
        effects = [
            effect
            for effect in conditions.effects
            if not self.is_seen(*effect) and (contexts is None or effect.context in contexts)
        ]
        if not effects:
            raise OptionError(
                ", but the model was trained on every perturbation in these cells; pass the perturbations to predict.",
                perturbations=None,
            )
        if without := sorted({effect.context for effect in effects} - {*controls}):
            raise DataError(f"the contexts {listing(without)} have no control cells to predict from; add controls.")
        return effects

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
                "has no effect, because 'perturbation' returns an AnnData; omit key_added.", key_added=key_added
            )
        if n_cells is not None:
            check_count("n_cells", n_cells, "controls")
        cells: Any = predictor.cells
        key, columns = self.perturbation_key, getattr(cells, "obs", None)
        fix = f"if no cell is perturbed, set adata.obs[{key!r}] = {self.control!r}"
        check_known("perturbation_key", key, () if columns is None else columns, "obs", fix=fix)
        conditions = self.conditions(cells.column)
        controls = conditions.control_rows()
        effects = self._wanted(conditions, controls, perturbations, contexts)
        most = n_cells or (_N_CELLS if single_cells else MAX_INPUTS)
        names = sorted({effect.context for effect in effects})
        inputs = {name: choose_rows(len(cells), most, rows=controls[name]) for name in names}
        means = control_means(cells, controls)
        linear, network, basis = self._parts(predictor, effects, inputs, means)
        coefficients = linear + float(predictor.module.head.weight) * network
        if single_cells:
            return self._predict_cells(predictor, effects, inputs, coefficients, basis)
        deltas = coefficients @ basis
        absolute = np.maximum(np.array([means[effect.context] for effect in effects]) + deltas, 0.0)
        labels = [self._keys.label(effect.targets) for effect in effects]
        obs = pd.DataFrame(
            {
                "perturbation": pd.Categorical(labels),
                "context": pd.Categorical([effect.context for effect in effects]),
                "n_controls": [len(inputs[effect.context]) for effect in effects],
                "is_seen": [self.is_seen(*effect) for effect in effects],
            },
            index=self._keys.titles(effects),
        )
        var = pd.DataFrame({"measured": _measured_genes(predictor)}, index=list(cells.vocab.genes))
        predicted = AnnData(absolute.astype(np.float32), obs=obs, var=var)
        predicted.layers["delta"] = deltas.astype(np.float32)
        predicted.uns[UNS_KEY] = {
            "predicted": {
                "X": "mean of log1p of counts per 10,000",
                "delta": "difference of X to the controls of the context",
                "control": self.control,
                "perturbation_key": self.perturbation_key,
                "network_weight": float(predictor.module.head.weight),
            }
        }
        return predicted

    def _predict_cells(
        self,
        predictor: Predictor,
        effects: Sequence[Effect],
        inputs: Mapping[str, np.ndarray],
        coefficients: np.ndarray,
        basis: np.ndarray,
    ) -> AnnData:
        """Return predicted cells of each effect, from the controls `inputs`."""
        cells: Any = predictor.cells
        measured = _measured_genes(predictor)
        spread = predictor.module.head.spread.double().cpu().numpy()
        controls = {name: log_expression(cells, rows).toarray().astype(np.float64) for name, rows in inputs.items()}
        var = pd.DataFrame(index=np.array(cells.vocab.genes, dtype=object)[measured])
        predicted: list[AnnData] = []
        for effect, own in zip(effects, coefficients, strict=True):
            shifted = shifted_cells(controls[effect.context], own @ basis, own, basis, spread)[:, measured]
            obs = pd.DataFrame({self.perturbation_key: [self._keys.label(effect.targets)] * len(shifted)})
            if self.context_key is not None:
                obs[self.context_key] = effect.context
            obs.index = [f"predicted {len(predicted)}-{row}" for row in range(len(shifted))]
            predicted.append(AnnData(sparse.csr_matrix(shifted, dtype=np.float32), obs=obs, var=var))
        return concat(predicted)

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score the mean effects of perturbations that the model was not trained on.

        Effects are measured against the controls among the scored cells. The other controls of the same data are the
        inputs of the model. If a context has no other controls, half of its controls are inputs.

        Returns
        -------
        Each metric of :func:`~scforge.perturbation.metrics.score_deltas`, averaged over perturbations, for the
        model, each of :func:`~scforge.perturbation.baselines.baseline_effects`, and ``technical_duplicate``. Additional
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
        cells, genes = context.predictor.cells, _measured_genes(context.predictor)
        conditions = self.conditions(cells.column)
        effects = [effect for effect in conditions.effects_in(context.rows) if not self.is_seen(*effect)]
        if not effects:
            raise DataError("the scored cells have no unseen perturbation; hold out perturbations (heldout=[...]).")
        inputs, tested = _divide_controls(conditions, context, {effect.context for effect in effects})
        scored = np.concatenate([context.rows[conditions.is_perturbed[context.rows]], *tested.values()])
        measured, rows, groups, controls = measured_effects(cells, conditions, effects, scored)
        linear, network, basis = self._parts(context.predictor, effects, inputs, control_means(cells, inputs))
        weight, trained = float(context.predictor.module.head.weight), None
        predictions = {"scforge": (linear + weight * network) @ basis}
        if context.train is None:
            predictions["no_change"] = np.zeros((len(effects), len(genes)))
        else:
            in_training = _measured_genes(context.train)
            train_effects = self._known(context, context.train, inputs)
            predictions |= self._baselines(context, context.train, train_effects, effects, inputs)
            genes = genes & in_training
            trained = train_effects.deltas[:, genes[in_training]], train_effects.contexts
        predictions = {name: deltas[:, genes] for name, deltas in predictions.items()}
        warn_of_few(len(effects))
        center, contexts = predictions.get("train_mean"), [effect.context for effect in effects]
        reference = (measured.deltas[:, genes], measured.scores[:, genes], de_genes(measured.p_values[:, genes]))
        tables = {
            name: score_deltas(deltas, *reference, center, contexts, trained) for name, deltas in predictions.items()
        }
        expression = log_expression(cells, rows)[:, genes]
        tables[TECHNICAL_DUPLICATE] = technical_duplicate(
            expression, groups, controls, center, contexts, trained, seed=context.seed
        )
        described = pd.DataFrame(
            {
                "perturbation": [self._keys.label(effect.targets) for effect in effects],
                "context": contexts,
                "n_cells": measured.n_cells,
                "n_controls": measured.n_controls,
            }
        )
        metrics = pd.DataFrame({name: table.mean() for name, table in tables.items()}).T[list(METRICS)]
        whole = [pd.concat([described.assign(method=name), table], axis=1) for name, table in tables.items()]
        more = {"per_perturbation": pd.concat(whole, ignore_index=True)}
        more["network"] = pd.DataFrame({"weight": [weight]}, index=["scforge"])
        if center is not None:
            same = comparable(more["per_perturbation"], TECHNICAL_DUPLICATE)
            means = same.groupby("method")[list(METRICS)].mean().reindex(metrics.index)
            more["calibrated"] = calibrated(means, "train_mean", TECHNICAL_DUPLICATE)
        return Evaluated(metrics, more)

    def _baselines(
        self,
        context: EvaluationContext,
        train: Predictor,
        train_effects: KnownEffects,
        effects: Sequence[Effect],
        inputs: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return the effects predicted by baselines, shape (Q, G); 0 for genes missing in the training cells."""
        trained = np.flatnonzero(_measured_genes(train))
        vocab: Any = train.cells.vocab
        targets = sorted({target for effect in (*train_effects.effects, *effects) for target in effect.targets})
        # A baseline knows what the training tells of a gene, also where the scored data lack it.
        columns = {int(gene): column for column, gene in enumerate(trained)}
        indices = {target: int(index) for target, index in zip(targets, vocab.gene_indices(targets), strict=True)}
        head: PerturbationHead = context.predictor.module.head
        features = head.features[vocab.n_special :, :N_COMPONENTS].cpu().numpy().astype(np.float64)
        spread = features.std(axis=0)
        # In units of their spread: the penalty of the linear model is for features of that size.
        features = np.divide(features, spread, out=np.zeros_like(features), where=spread > 0)
        of_contexts: dict[str, np.ndarray] = {}
        if self.context_key is not None:
            # Components of the mean control embedding of each context, from the model before fine-tuning.
            predictor = context.predictor if context.base is None else context.base
            means = np.array([predictor.embedding(rows).mean(axis=0) for rows in inputs.values()], dtype=np.float64)
            left, values, _ = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
            scores = (left * values)[:, :N_COMPONENTS]
            of_contexts = dict(zip(inputs, scores / max(float(scores.std()), 1e-12), strict=True))
        wanted = WantedEffects(
            effects,
            genes={target: columns[index] for target, index in indices.items() if index in columns},
            gene_features={target: features[index] for target, index in indices.items() if index >= 0},
            context_features=of_contexts,
        )
        predicted = {}
        for name, deltas in baseline_effects(train_effects, wanted, fitted=context.baselines).items():
            predicted[name] = np.zeros((len(effects), vocab.n_genes))
            predicted[name][:, trained] = deltas
        return predicted

    def _known(self, context: EvaluationContext, train: Predictor, inputs: Mapping[str, np.ndarray]) -> KnownEffects:
        """Measure the effects in the training cells only, over all genes measured in these cells."""
        rows: Any = context.train_rows
        cells, genes = train.cells, _measured_genes(train)
        conditions = self.conditions(cells.column)
        effects = conditions.effects_in(rows)
        measured, *_ = measured_effects(cells, conditions, effects, rows)
        means = control_means(cells, conditions.control_rows(rows))
        if elsewhere := {name: control_rows for name, control_rows in inputs.items() if name not in means}:
            means |= control_means(context.predictor.cells, elsewhere)
        controls = {name: mean[genes] for name, mean in means.items()}
        return KnownEffects(effects, measured.deltas[:, genes], controls, measured.n_cells)


def hold_out(
    conditions: Conditions,
    keys: PerturbationKeys,
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
    keys
        Columns and labels of the perturbations.
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
    what, argument = ("context", "heldout_contexts") if by_context else ("perturbation", "heldout")
    labels = [effect.context if by_context else keys.label(effect.targets) for effect in conditions.effects]
    targets = {label: effect.targets for label, effect in zip(labels, conditions.effects, strict=True)}
    names = sorted(targets) if by_context else list(targets)
    if not names:
        raise DataError("all cells are controls, so there is nothing to learn from; add perturbed cells.")
    if unknown := [name for name in named or () if name not in targets]:
        raise OptionError(
            f"is not the label of a perturbed cell{suggest(unknown[0], names, 'labels')}",
            argument=argument,
            value=unknown[0],
        )

    def draw(order: list[str], share: float) -> list[str]:
        """Take a fraction of all names from the front of `order`: at least one, but leave at least one."""
        wanted = min(max(1, round(share * len(names))), len(order) - 1) if share else 0
        if known is None or by_context:
            return order[:wanted]
        drawn: list[str] = []
        for name in order:
            if len(drawn) < wanted:
                rest = {target for other in order if other not in {name, *drawn} for target in targets[other]}
                if all(known(target) or target in rest for target in targets[name]):
                    drawn.append(name)
        return drawn

    rng = np.random.default_rng(seed)
    order = [names[i] for i in rng.permutation(len(names))]
    test = draw(order, test_size) if named is None else list(named)
    rest = [name for name in order if name not in test]
    if not rest or (named is None and test_size and not test):
        held_out = listing([name for name in names if name in test] or order)
        raise OptionError(f"holding out {held_out} leaves no {what} to train on; hold out fewer, or set test_size=0.")
    validation = draw(rest, validation_size) if len(rest) > 1 else []
    controls, test_controls, few = conditions.control_rows(), [], []
    for name in conditions.contexts:
        rows = controls.get(name, np.empty(0, dtype=np.int64))
        if len(rows) < 2 and any(effect.context == name for effect in conditions.effects):
            few.append(name)
        test_controls.append(rng.permutation(rows)[: round(len(rows) * _TEST_CONTROLS) or len(rows) // 2])
    if few:
        raise DataError(f"the contexts {listing(few)} have fewer than 2 control cells; remove these contexts.")
    is_tested = np.zeros(len(conditions.groups), dtype=bool)
    if test:  # otherwise nothing is tested against them
        is_tested[np.concatenate(test_controls)] = True
    in_test, in_validation = (
        np.isin(conditions.groups, [i for i, label in enumerate(labels) if label in part])
        for part in (test, validation)
    )
    return Split(
        train=np.flatnonzero((conditions.groups >= 0) & ~(in_test | in_validation | is_tested)),
        validation=np.flatnonzero(in_validation),
        test=np.flatnonzero(in_test | is_tested),
    )


def _divide_controls(
    conditions: Conditions, context: EvaluationContext, needed: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return, for each needed context, the controls used as inputs and those that effects are measured against."""
    is_scored = np.zeros(len(conditions.groups), dtype=bool)
    is_scored[context.rows] = True
    tested, inputs = (conditions.control_rows(np.flatnonzero(part)) for part in (is_scored, ~is_scored))
    rng = np.random.default_rng(context.seed)
    few = [name for name in sorted(needed) if len(tested.get(name, ())) < (1 if name in inputs else 2)]
    if few:
        raise DataError(f"the contexts {listing(few)} have too few controls among the scored cells; add control cells.")
    for name in sorted(needed - {*inputs}):
        shuffled = rng.permutation(tested[name])
        inputs[name] = np.sort(shuffled[: len(shuffled) // 2])
        tested[name] = np.sort(shuffled[len(shuffled) // 2 :])
    inputs = {name: choose_rows(len(is_scored), MAX_INPUTS, rows=rows) for name, rows in inputs.items()}
    return inputs, tested


def _measured_genes(predictor: Predictor) -> np.ndarray:
    """Return which genes were measured in the cells, bool, shape (G,)."""
    cells: Any = predictor.cells
    return np.ones(cells.vocab.n_genes, dtype=bool) if cells.measured is None else cells.measured
