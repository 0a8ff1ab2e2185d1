"""Adaptation: continue training with the pretraining objective on new cells, optionally with frozen base weights."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from anndata import AnnData
from torch import nn

from scforge._constants import OBSM_KEY
from scforge.data.cells import CellBlock, Cells
from scforge.errors import OptionError
from scforge.finetuning.base import (
    Batch,
    Evaluated,
    EvaluationContext,
    Loss,
    Predictor,
    Task,
    register_task,
    with_adapters,
)
from scforge.finetuning.mapping import QueryMapping, Unchanged
from scforge.models.components.latent import batch_vectors
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective, TrainingDefaults


@register_task("adaptation")
class Adaptation(Task):
    """Continue training with the pretraining objective; no labels are needed.

    With adapters (``lora=True``), the weights of the base model do not change.
    :meth:`scforge.models.Encoder.load_query_data` uses this task to adapt a reference model to a query.

    Parameters
    ----------
    n_reference
        Number of reference batches. Only the decoder's vectors for later batches are trained. If None, trains all
        parameters. See :meth:`scforge.models.Encoder.load_query_data`, which sets it.
    n_clusters
        Number of query clusters that are moved onto the reference; 0 disables the mapping. Set by the same method.
    n_tokens
        Vocabulary size of the reference, for factors per gene. Set by the same method.
    """

    keys = ()
    learns_labels = False

    def __init__(self, *, n_reference: int | None = None, n_clusters: int = 0, n_tokens: int = 0) -> None:
        self.n_reference = n_reference
        self.n_clusters = n_clusters
        self.n_tokens = n_tokens

    @property
    def base_objective(self) -> Objective:
        """The pretraining objective."""
        assert self.pretraining is not None
        return self.pretraining

    @property
    def defaults(self) -> TrainingDefaults:  # type: ignore[override]
        """Return the pretraining defaults; batch vectors use the learning rate of adapters."""
        return self.base_objective.defaults if self.n_reference is None else with_adapters(self.base_objective.defaults)

    def for_adapters(self) -> None:
        """Keep the pretraining learning rate."""

    @property
    def random_batches(self) -> bool:  # type: ignore[override]
        """Whether batches must be random samples, as in pretraining."""
        return self.base_objective.random_batches

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise :class:`~scforge.errors.OptionError` if the objective does not work with a tokenizer."""
        self.base_objective.check(tokenizer)

    def make_head(self, n_latent: int, module: nn.Module) -> nn.Module:
        """Return a head that moves embeddings; unfreeze the decoder's batch vectors if only new batches are trained."""
        n, vectors = self.n_reference, batch_vectors(module)
        if n is not None and vectors is not None and len(vectors) > n:
            vectors.requires_grad_(True)
        return QueryMapping(n_latent, self.n_clusters, self.n_tokens) if self.n_clusters else Unchanged()

    def learn_from(self, module: nn.Module) -> None:
        """Read properties of the encoder that the objective needs."""
        encoder: Any = module.encoder
        if self.n_reference is not None and not any(p.requires_grad for p in encoder.parameters()):
            raise OptionError(
                "the query model has nothing to train, because only new batches are trained; skip training, or call "
                "load_query_data(..., batch_key=...)."
            )
        n, vectors = self.n_reference, batch_vectors(encoder)
        if n is not None and vectors is not None and vectors.requires_grad and len(vectors) > n:
            # Registered here because a copy of a module has no hooks. Embeddings have no weight decay, so a vector
            # without a gradient does not change.
            new = (torch.arange(len(vectors)) >= n).unsqueeze(1)
            vectors.register_hook(lambda gradient: gradient * new.to(gradient))
        self.base_objective.learn_from(encoder)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the cell data for the objective; cells may lack the classes and batches of pretraining."""
        objective: Any = self.base_objective
        # Neighbors are needed only if the encoder is trained.
        getattr(objective, "bind_query", objective.bind)(
            cells, train_rows if self.n_reference is None else train_rows[:0]
        )

    def max_tokens(self, tokenizer: Tokenizer) -> int:
        """Return the maximum number of tokens per cell."""
        return self.base_objective.max_tokens(tokenizer)

    def n_cells(self, batch: Batch) -> int:
        """Return the number of cells in a batch."""
        return self.base_objective.n_cells(batch)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> Batch:
        """Return a batch of the pretraining objective."""
        return self.base_objective.prepare(block, tokenizer, epoch=epoch, seed=seed)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Return the loss and the metrics of the pretraining objective."""
        encoder: Any = module.encoder
        return self.base_objective.loss(encoder, batch)

    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Raise an error, because the architecture computes the loss, not a head."""
        raise NotImplementedError("call loss(module, batch)")

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics that the pretraining objective logs per epoch."""
        return self.base_objective.summarize(means)

    def predict(  # type: ignore[override]
        self, predictor: Predictor, adata: AnnData | None, *, key_added: str | None = None
    ) -> np.ndarray:
        """Embed cells, and write the embedding into ``obsm["X_scforge"]``, or under `key_added`.

        Returns
        -------
        The embedding, float32, shape (N, D).
        """
        embedding = predictor.embedding()
        if adata is not None:
            adata.obsm[key_added or OBSM_KEY] = embedding
        return embedding

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Raise an error, as in :meth:`check_evaluate`."""
        self.check_evaluate()

    def check_evaluate(self) -> NoReturn:
        """Raise an error, because the task has no labels to compare with.

        Raises
        ------
        OptionError
            Always.
        """
        raise OptionError("the task 'adaptation' has no labels to score; use scforge.eval.evaluate instead.")
