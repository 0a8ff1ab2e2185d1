"""Integration: an embedding in which batches agree and biology stays.

Shapes: B cells, K views, D dimensions, V vocabulary, E batches, G genes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from scforge._checks import check_count, check_positive
from scforge.data.cells import CellBlock, Cells, CellSource
from scforge.data.thinning import thin
from scforge.errors import DataError, OptionError, TrainingError
from scforge.finetuning.base import Task, register_task
from scforge.finetuning.labels import check_classes, check_key, codes_of, text_labels
from scforge.finetuning.tasks._integration_head import IntegrationHead
from scforge.finetuning.tasks._integration_losses import align, negative_binomial
from scforge.finetuning.tasks._integration_scores import evaluate_integration
from scforge.models.components.sigreg import SIGReg
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.batch import concatenate, pad
from scforge.training.objectives.base import TrainingDefaults

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.finetuning.context import Evaluated, EvaluationContext, Predictor

__all__ = ["Integration"]

KEY = "X_scforge_integrated"
_KEEP, _GENE_DROPOUT = (0.3, 1.0), (0.0, 0.4)
_SLICES = 256
_OWN = ("counts", "batch")


@register_task("integration")
class Integration(Task):
    """Cells of different batches share an embedding; no label is looked at.

    Each cell is seen in several views, its counts thinned and some genes hidden. With z the embedding of a view::

        loss = agreement + alignment * SIGReg within each batch + reconstruction * decoder
    """

    defaults = TrainingDefaults(batch_size=256, lr=1e-3, weight_decay=0.01, schedule="one_cycle", max_epochs=40)
    keys = ("batch_key", "labels_key")
    # Cells of a batch are taken for a sample of it.
    random_batches = True

    def __init__(
        self,
        *,
        batch_key: str,
        labels_key: str | None = None,
        batches: Sequence[str] | None = None,
        n_reference: int | None = None,
        views: int = 2,
        alignment: float = 0.05,
        reconstruction: float = 10.0,
        adversary: float = 0.0,
        hidden_dim: int = 128,
    ) -> None:
        self.batch_key = check_key("batch_key", batch_key)
        self.labels_key = None if labels_key is None else check_key("labels_key", labels_key)
        self.batches = check_classes(batches)
        self.n_reference = n_reference
        check_count("views", views, "views of a cell", least=2)
        check_count("hidden_dim", hidden_dim, "dimensions")
        for name, value in {
            "alignment": alignment,
            "reconstruction": reconstruction,
            "adversary": adversary,
        }.items():
            check_positive(name, value, or_zero=True)
        if n_reference is not None:
            check_count("n_reference", n_reference, "batches")
            if self.batches is None or n_reference > len(self.batches):
                raise OptionError(f"n_reference={n_reference} are more batches than there are in batches={batches!r}.")
        self.views = int(views)
        self.alignment = float(alignment)
        self.reconstruction = float(reconstruction)
        self.adversary = float(adversary)
        self.hidden_dim = int(hidden_dim)
        self._sigreg = SIGReg(_SLICES)
        self._codes: np.ndarray | None = None
        self._measured: torch.Tensor | None = None

    def usable(self, column: Callable[[str], pd.Series]) -> np.ndarray:
        """Return which cells have a batch."""
        return np.asarray(column(self.batch_key).notna())

    def strata(self, column: Callable[[str], pd.Series]) -> pd.Series:
        """Return the batches, so that each keeps its share."""
        import pandas as pd

        values = column(self.batch_key)
        return pd.Series(text_labels(values, key=self.batch_key, argument="batch_key"), index=values.index)

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the batches of the training cells, unless they are known already.

        Raises
        ------
        DataError
            If there is one batch only.
        """
        if self.batches is not None:
            return {}
        found = text_labels(column(self.batch_key), key=self.batch_key, argument="batch_key").categories
        if len(found) < 2:
            raise DataError(
                f"batch_key={self.batch_key!r} has one batch only among the training cells ({str(found[0])!r}), so "
                "there is nothing to integrate; choose another column."
            )
        return {"batches": [str(name) for name in found]}

    @property
    def known_batches(self) -> list[str]:
        """The batches, or an error if they are not known yet."""
        if self.batches is None:
            raise TrainingError("batches are not known yet; give batches=[...], or fine-tune with cells.")
        return self.batches

    def make_head(self, n_latent: int, module: nn.Module) -> IntegrationHead:
        """Make the decoder."""
        size = getattr(module, "vocab_size", None)
        if not isinstance(size, int):
            raise OptionError(
                f"{type(module).__name__} has no attribute vocab_size, which tells the decoder of 'integration' how "
                "many tokens there are; add it."
            )
        return IntegrationHead(
            n_latent,
            size,
            len(self.known_batches),
            n_reference=self.n_reference,
            hidden_dim=self.hidden_dim,
            adversary=self.adversary > 0,
        )

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch of each cell; -1 for one that the decoder does not know."""
        column = cells.column(self.batch_key)
        self._codes = codes_of(column, self.known_batches, key=self.batch_key, argument="batch_key").clip(-1)
        self._measured = None if cells.measured is None else torch.from_numpy(cells.measured)

    def initialise(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Start the decoder at the mean expression."""
        head: Any = module.head
        head.start_at(np.asarray(cells.counts.sum(axis=0), dtype=np.float64).ravel(), tokenizer.vocab.n_special)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenise all views of all cells, view after view: (K * B, S); ``counts`` (B, G) and ``batch`` (B,)."""
        if self._codes is None:
            raise TrainingError("the batches of the cells are not known; call bind(cells, train_rows) first.")
        views = (
            thin(block, keep=_KEEP, gene_dropout=_GENE_DROPOUT, seed=seed, epoch=epoch, view=view)
            for view in range(self.views)
        )
        tokens = pad(concatenate([tokenizer.ragged(view) for view in views]))
        tokens = self.arrange(tokens, tokenizer, np.tile(block.rows, self.views), epoch=epoch, seed=seed)
        counts = np.zeros((len(block), tokenizer.vocab.n_genes), dtype=np.float32)
        counts[np.repeat(np.arange(len(block)), np.diff(block.indptr)), block.genes] = block.counts
        return {**tokens, "counts": torch.from_numpy(counts), "batch": torch.from_numpy(self._codes[block.rows])}

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of cells, each of which stands there once a view."""
        return batch["batch"].shape[0]

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and its parts."""
        model: Any = module
        codes, counts = batch["batch"], batch["counts"]
        tokens = {name: tensor for name, tensor in batch.items() if name not in _OWN}
        z_kbd = model.encode(**tokens).float().unflatten(0, (self.views, -1))
        agreement = (z_kbd - z_kbd.mean(dim=0)).square().mean()
        sigreg = align(self._sigreg.to(z_kbd.device), z_kbd, codes, len(self.known_batches), fresh=module.training)
        measured = None if self._measured is None else self._measured.to(z_kbd.device)
        logits = model.head.decode(z_kbd, codes)[..., -counts.shape[1] :]
        decoder = negative_binomial(logits, counts, model.head.log_dispersion[-counts.shape[1] :], measured)
        loss = agreement + self.alignment * sigreg + self.reconstruction * decoder
        figures = {"agreement": agreement, "sigreg": sigreg, "decoder": decoder}
        return loss, {name: value.detach() for name, value in figures.items()}

    def loss_of(
        self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Raise: the loss is that of embeddings, not of the expression that the head returns."""
        raise TrainingError("integration has no loss of the outputs of its head; call loss(module, batch).")

    def predict(  # type: ignore[override]
        self, predictor: Predictor, adata: AnnData | None, *, key_added: str | None = None
    ) -> np.ndarray:
        """Embed cells, of any batches, and write the embedding into ``obsm["X_scforge_integrated"]``.

        Parameters
        ----------
        predictor, adata
            The model over the cells, and where to write; None: nowhere.
        key_added
            Key in obsm, in place of ``"X_scforge_integrated"``.

        Returns
        -------
        Float32, shape (N, D): what ``get_latent_representation`` returns, too.
        """
        key = KEY if key_added is None else check_key("key_added", key_added)
        embedding = predictor.embedding()
        if adata is not None:
            adata.obsm[key] = embedding
        return embedding

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score mixing and biology; see :func:`evaluate_integration`."""
        return evaluate_integration(self, context)
