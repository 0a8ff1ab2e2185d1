"""Perturbation: how expression changes when genes are perturbed that the model never saw perturbed.

Shapes: B cells of a batch, T targets of a perturbation, V tokens, P effects (a perturbation in a context), R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from scforge._checks import check_count
from scforge._constants import PAD_ID
from scforge.errors import DataError, OptionError, TrainingError, listing
from scforge.finetuning.base import Task, register_task
from scforge.finetuning.heads import check_head
from scforge.finetuning.labels import check_key
from scforge.finetuning.tasks._perturbation_conditions import Conditions, hold_out
from scforge.finetuning.tasks._perturbation_data import BoundEffects
from scforge.finetuning.tasks._perturbation_fit import Observed, blocks_of, fit_linear
from scforge.finetuning.tasks._perturbation_head import (
    MOST_FEATURES,
    PerturbationHead,
    gene_features,
    gene_table,
    table_shape,
)
from scforge.models._utils import check_choice
from scforge.training.objectives.base import TrainingDefaults
from scforge.training.predict import embed

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.data.cells import CellBlock, Cells, CellSource
    from scforge.data.vocab import GeneVocab
    from scforge.finetuning.context import Evaluated, EvaluationContext, Predictor
    from scforge.finetuning.module import FineTunedModule
    from scforge.finetuning.splits import Split
    from scforge.tokenizers.base import Tokenizer

__all__ = ["Perturbation"]

_PROBED_CELLS = 256
"""Controls of a context that the linear model is fitted with."""


@register_task("perturbation")
class Perturbation(Task):
    """The change of mean expression under perturbations that were never seen, and under combinations.

    The target is the change of the mean log1p CP10K against the controls (of the context). The input is a control cell
    of the same context, drawn anew for each perturbed cell and epoch, and what the model knows of the perturbed genes:
    their embeddings. All cells of a perturbation share one target, which leaves the gradient as it is on average, and
    takes the noise of single cells out of it. See :class:`PerturbationHead` for how the two are combined; training
    begins at a ridge regression, which predicts the mean of the training effects where gene embeddings tell nothing.

    Whole perturbations are held out, or with ``split_by=context_key`` whole contexts: the perturbed cells of these,
    whose controls are inputs all the same. Controls are split by cell: two thirds of each context are inputs, and one
    third is what effects are tested against, so that the noise of the controls is not shared by prediction and test.

    A target that the model's vocabulary lacks, e.g. a drug, has a learned vector of its own: its effect can be
    predicted in other contexts and combinations once it was seen, but not before.

    Parameters
    ----------
    perturbation_key
        Column of obs with what a cell was perturbed with, see :func:`scforge.data.parse_perturbations`.
    control
        The label of control cells there, e.g. ``"control"`` or ``"non-targeting"``.
    separator
        What joins the parts of a combination; None if labels are never taken apart.
    context_key
        Column of obs with e.g. the cell type or the batch, within which cells are compared with controls; None
        compares with all.
    heldout
        Perturbations to test on; None draws them, as many as `test_size` says.
    heldout_contexts
        Contexts to test on, in place of perturbations; None draws them where ``split_by=context_key``.
    delta_loss
        ``"mse"``, or ``"wmse"``: squared errors weighted by the differential expression of the gene under the
        perturbation, see :func:`scforge.eval.perturbation_metrics.de_weights`.
    rank
        Most directions in which effects differ; they start as the principal components of the training effects.
    head
        Options of the head, a dict of ``hidden_dim`` (0: linear) and ``dropout``.
    perturbations
        Perturbations of the training, each with its contexts; found in the training cells.
    """

    keys = ("perturbation_key", "context_key")
    makes_cells = True
    defaults = TrainingDefaults(batch_size=64, lr=1e-4, weight_decay=0.01, schedule="cosine_warmup", max_epochs=10)
    vocab: GeneVocab | None = None
    """Genes of the model, set before cells are split, so that only perturbations that it can know are drawn."""

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
        perturbations: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.perturbation_key = check_key("perturbation_key", perturbation_key)
        if not isinstance(control, str) or not control:
            raise OptionError(f"control={control!r} is no label; give that of the cells that were not perturbed.")
        self.control = control
        self.separator = separator
        self.context_key = None if context_key is None else check_key("context_key", context_key)
        self.heldout = _checked_names("heldout", heldout)
        self.heldout_contexts = _checked_names("heldout_contexts", heldout_contexts)
        if self.heldout is not None and self.heldout_contexts is not None:
            raise OptionError("heldout and heldout_contexts are both given; hold out perturbations, or contexts.")
        if self.heldout_contexts is not None and self.context_key is None:
            raise OptionError(f"heldout_contexts={self.heldout_contexts!r} needs context_key; name that column.")
        check_choice("delta_loss", delta_loss, ["mse", "wmse"])
        self.delta_loss = delta_loss
        check_count("rank", rank, "directions")
        self.rank = int(rank)
        self.head = check_head(head)
        if perturbations is not None and not isinstance(perturbations, Mapping):
            raise OptionError("perturbations is no dict of perturbations and their contexts; leave it out.")
        self.perturbations = None if perturbations is None else {k: list(v) for k, v in perturbations.items()}
        self._bound: BoundEffects | None = None
        self._genes: GeneVocab | None = None

    # --- cells

    def conditions(self, column: Callable[[str], pd.Series]) -> Conditions:
        """Read perturbation and context of cells."""
        return Conditions.read(
            column,
            perturbation_key=self.perturbation_key,
            control=self.control,
            separator=self.separator,
            context_key=self.context_key,
        )

    def usable(self, column: Callable[[str], pd.Series]) -> np.ndarray:
        """Return which cells have a perturbation, or are controls, and have a context."""
        return self.conditions(column).usable

    def split(
        self,
        column: Callable[[str], pd.Series],
        *,
        validation_size: float,
        test_size: float,
        split_by: str | None,
        seed: int,
    ) -> Split:
        """Hold out whole perturbations, or contexts."""
        if split_by not in (None, self.perturbation_key, self.context_key):
            raise OptionError(
                f"split_by={split_by!r} holds out neither perturbations nor contexts; leave it out, or give that "
                "column as context_key, too."
            )
        conditions = self.conditions(column)
        by_context = self.heldout_contexts is not None or (
            self.context_key is not None and split_by == self.context_key
        )
        if by_context and self.heldout is not None:
            raise OptionError(f"heldout={self.heldout!r} names perturbations, but split_by={split_by!r}; give one.")
        vocab = self.vocab
        return hold_out(
            conditions,
            by_context=by_context,
            named=self.heldout_contexts if by_context else self._canonical(self.heldout),
            argument="heldout_contexts" if by_context else "heldout",
            known=None if vocab is None else (lambda target: bool(vocab.gene_indices([target])[0] >= 0)),
            validation_size=validation_size,
            test_size=test_size,
            seed=seed,
        )

    def _canonical(self, names: Sequence[str] | None) -> list[str] | None:
        """Return names of perturbations with sorted parts, without the control."""
        for name in names or ():
            if not self.parts(name):
                raise OptionError(f"heldout names {name!r}, which is the control; leave it out.")
        return None if names is None else [self.name_of(self.parts(name)) for name in names]

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the targets of the name of a perturbation."""
        found = [name] if self.separator is None else [part.strip() for part in name.split(self.separator)]
        return tuple(sorted({part for part in found if part and part != self.control}))

    def name_of(self, targets: Sequence[str]) -> str:
        """Return the name of a perturbation."""
        return (self.separator or "+").join(targets)

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the perturbations of the training cells.

        Raises
        ------
        DataError
            If there is none.
        """
        conditions = self.conditions(column)
        found = conditions.pairs(np.arange(len(conditions.perturbation)))
        if not found:
            raise DataError(
                f"perturbation_key={self.perturbation_key!r} has no other label than control={self.control!r} among "
                "the training cells; there is nothing to learn."
            )
        return {"perturbations": found}

    @property
    def seen_targets(self) -> list[str]:
        """Targets of the training, sorted."""
        names = self.perturbations or {}
        return sorted({target for name in names for target in self.parts(name)})

    def is_seen(self, targets: tuple[str, ...], context: str) -> bool:
        """Say whether the model was trained on a perturbation in a context."""
        return context in (self.perturbations or {}).get(self.name_of(targets), ())

    def encode_targets(self, wanted: Sequence[tuple[str, ...]], vocab: GeneVocab) -> dict[str, torch.Tensor]:
        """Return what the head takes for perturbations: tokens and numbers of their targets, int64, shape (B, T).

        Raises
        ------
        OptionError
            If a target is neither a gene of the model nor was seen in training.
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
            raise OptionError(
                f"the targets {listing(sorted(unknown))} are no genes of the model, nor were they perturbed in its "
                "training, so that nothing is known of them; leave their cells out, train on them (heldout=[...] names "
                f"others, e.g. among {listing(t for t in self.seen_targets if vocab.gene_indices([t])[0] >= 0)}), or "
                "choose a model that knows them."
            )
        return {"perturbed_tokens": tokens, "perturbed_targets": own}

    # --- the module

    def make_head(self, n_latent: int, module: nn.Module) -> PerturbationHead:
        """Make the head, see :class:`PerturbationHead`."""
        n_tokens, width = table_shape(gene_table(module))
        options = {"hidden_dim": 64, "dropout": 0.1} | self.head
        return PerturbationHead(
            n_latent, n_tokens, min(MOST_FEATURES, width), len(self.seen_targets), self.rank, **options
        )

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Measure effects, and keep controls as inputs."""
        assert cells.vocab is not None
        self._genes = cells.vocab
        conditions = self.conditions(cells.column)
        self._bound = BoundEffects.of(cells, conditions, train_rows, weighted=self.delta_loss == "wmse")
        self._encoded = self.encode_targets(
            [self._bound.targets_of(group) for group in range(len(self._bound.groups))], cells.vocab
        )

    def initialise(self, module: FineTunedModule, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Start the head at a ridge regression on gene embeddings and controls."""
        bound, vocab = self._bound, self._genes
        if bound is None or vocab is None:
            raise TrainingError("the task 'perturbation' is not bound to cells; call bind(cells, train_rows) first.")
        head: PerturbationHead = module.head
        head.features.copy_(gene_features(gene_table(module.encoder), vocab.n_special, head.features.shape[1]))
        chosen = [rows[:_PROBED_CELLS] for rows in bound.inputs]
        embeddings = embed(module, bound.pool, tokenizer, objective=self, rows=np.concatenate(chosen))
        head.standardise.set_from(embeddings)
        scaled = (embeddings - head.standardise.mean.cpu().numpy()) / head.standardise.scale.cpu().numpy()
        ends = np.cumsum([len(rows) for rows in chosen])
        means = np.array([part.mean(axis=0) if len(part) else scaled[0] * 0 for part in np.split(scaled, ends[:-1])])
        trained = np.flatnonzero(bound.trained)
        groups = bound.groups[trained]
        features = head.features.cpu()[self._encoded["perturbed_tokens"][trained]].sum(dim=1).numpy()
        members = np.zeros((len(trained), len(self.seen_targets)))
        numbers = self._encoded["perturbed_targets"][trained].numpy()
        rows, places = np.nonzero(numbers)
        members[rows, numbers[rows, places] - 1] = 1.0
        deltas = np.zeros((len(trained), head.basis.shape[1]))
        deltas[:, vocab.n_special :] = bound.deltas[trained]
        start = fit_linear(
            Observed(
                deltas=deltas,
                n_cells=bound.n_cells[trained],
                members=members,
                features=features.astype(np.float64),
                cells=means[groups[:, 1]].astype(np.float64),
                blocks=blocks_of(bound.groups, bound.trained, by_context=self.heldout_contexts is not None),
            ),
            self.rank,
        )
        with torch.no_grad():
            for parameter, values in (
                (head.base, start.base),
                (head.of_features.weight, start.of_features),
                (head.own.weight, start.own),
                (head.of_cell.weight, start.of_cell),
                (head.basis, start.basis),
            ):
                parameter.copy_(torch.from_numpy(values))

    # --- training

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Return a control for each perturbed cell, and the effect to predict; control cells are passed over."""
        bound, vocab = self._bound, self._genes
        if bound is None or vocab is None:
            raise TrainingError("the task 'perturbation' is not bound to cells; call bind(cells, train_rows) first.")
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
            "delta": torch.from_numpy(bound.deltas[groups]),
            "delta_weights": torch.from_numpy(bound.weights[groups]),
            "counted": torch.from_numpy(counted),
        }

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of perturbed cells."""
        return int(batch["counted"].sum())

    def loss_of(
        self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the (weighted) mean squared error of effects, and their mean cosine similarity."""
        delta = batch["delta"]
        predicted = outputs[:, outputs.shape[1] - delta.shape[1] :].float()
        errors = (batch["delta_weights"] * (predicted - delta).square()).mean(dim=1)
        counted = batch["counted"]
        n_counted = counted.sum().clamp(min=1)
        cosine = nn.functional.cosine_similarity(predicted.detach(), delta, dim=1)
        return (errors * counted).sum() / n_counted, {"cosine": (cosine * counted).sum() / n_counted}

    # --- afterwards

    def predict(  # type: ignore[override]
        self,
        predictor: Predictor,
        adata: AnnData | None,
        *,
        key_added: str | None = None,
        perturbations: Sequence[str] | None = None,
        contexts: Sequence[str] | None = None,
        n_cells: int | None = None,
    ) -> AnnData:
        """Predict mean expression under perturbations; see :func:`predict_effects`."""
        from scforge.finetuning.tasks._perturbation_predict import predict_effects

        if key_added is not None:
            raise OptionError(
                f"key_added={key_added!r}: the task 'perturbation' writes nothing into adata, it returns an AnnData of "
                "its own; leave key_added out."
            )
        return predict_effects(self, predictor, perturbations=perturbations, contexts=contexts, n_cells=n_cells)

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score effects of held-out perturbations; see :func:`evaluate_effects`."""
        from scforge.finetuning.tasks._perturbation_report import evaluate_effects

        return evaluate_effects(self, context)


def _checked_names(argument: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not value or not all(isinstance(name, str) for name in value):
        raise OptionError(f"{argument}={value!r} is not a list of names; give e.g. ['STAT1'], or leave it out.")
    return list(value)
