"""Integration: an embedding in which batches agree and biology stays.

Shapes: B cells, D dimensions, G genes.
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

    A decoder predicts the counts y of a cell from the embedding of a thinned view of it (a share of its counts, some
    genes hidden) and from its batch e::

        loss = mean of -log NB(y_g; share_g(z, e) * library size, dispersion_g) + alignment * SIGReg within each batch

    What the batch explains, the embedding z need not hold, and what tells cells of a batch apart, it has to.
    SIGReg pulls each batch onto the same Gaussian.

    Parameters
    ----------
    batch_key
        Column of obs with the batches. Cells without batch take no part.
    labels_key
        Column of obs with the cell types, for :meth:`evaluate` alone.
    batches
        The batches of the training cells, in the order of the decoder; None sorts them.
    n_reference
        Number of first batches that a reference model knew; see
        :meth:`scforge.models.Encoder.load_query_data`, which sets it.
    alignment
        Weight of SIGReg, 0 for none. More of it (0.02) mixes batches that are far apart, and spreads cell types, which
        then are harder to tell apart, above all where batches differ in which types they have.
    hidden_dim
        Width of the decoder.
    """

    defaults = TrainingDefaults(batch_size=256, lr=1e-3, weight_decay=0.01, schedule="one_cycle", max_epochs=40)
    keys = ("batch_key", "labels_key")
    learns_labels = False
    # Cells of a batch are taken for a sample of it.
    random_batches = True

    def __init__(
        self,
        *,
        batch_key: str,
        labels_key: str | None = None,
        batches: Sequence[str] | None = None,
        n_reference: int | None = None,
        alignment: float = 0.001,
        hidden_dim: int = 128,
    ) -> None:
        self.batch_key = check_key("batch_key", batch_key)
        self.labels_key = None if labels_key is None else check_key("labels_key", labels_key)
        self.batches = check_classes(batches)
        self.n_reference = n_reference
        check_positive("alignment", alignment, or_zero=True)
        check_count("hidden_dim", hidden_dim, "dimensions")
        if n_reference is not None:
            check_count("n_reference", n_reference, "batches")
            if self.batches is None or n_reference > len(self.batches):
                raise OptionError(f"n_reference={n_reference} are more batches than there are in batches={batches!r}.")
        self.alignment = float(alignment)
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
        """Tokenise a view of each cell; add ``counts``, shape (B, G), and ``batch``, shape (B,)."""
        if self._codes is None:
            raise TrainingError("the batches of the cells are not known; call bind(cells, train_rows) first.")
        view = thin(block, keep=_KEEP, gene_dropout=_GENE_DROPOUT, seed=seed, epoch=epoch, view=0)
        tokens = self.arrange(tokenizer(view), tokenizer, block.rows, epoch=epoch, seed=seed)
        counts = np.zeros((len(block), tokenizer.vocab.n_genes), dtype=np.float32)
        counts[np.repeat(np.arange(len(block)), np.diff(block.indptr)), block.genes] = block.counts
        return {**tokens, "counts": torch.from_numpy(counts), "batch": torch.from_numpy(self._codes[block.rows])}

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and its parts."""
        model: Any = module
        codes, counts = batch["batch"], batch["counts"]
        tokens = {name: tensor for name, tensor in batch.items() if name not in _OWN}
        z_bd = model.encode(**tokens).float()
        measured = None if self._measured is None else self._measured.to(z_bd.device)
        logits = model.head.decode(z_bd, codes)[:, -counts.shape[1] :]
        decoder = negative_binomial(logits, counts, model.head.log_dispersion[-counts.shape[1] :], measured)
        figures = {"decoder": decoder.detach(), "spread": z_bd.detach().std(dim=0, correction=0).mean()}
        if not self.alignment:
            return decoder, figures
        sigreg = align(self._sigreg.to(z_bd.device), z_bd, codes, len(self.known_batches), fresh=module.training)
        return decoder + self.alignment * sigreg, {**figures, "sigreg": sigreg.detach()}

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
