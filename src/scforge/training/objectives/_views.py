"""Random views of cells: counts thinned, genes hidden."""

from __future__ import annotations

from collections.abc import Sequence

from scforge._checks import check_share
from scforge.data.cells import CellBlock
from scforge.data.thinning import thin
from scforge.errors import OptionError
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.batch import TokenBatch, concatenate, pad
from scforge.training.objectives.base import Objective

__all__ = ["SeesViews"]


class SeesViews(Objective):
    """An objective that sees cells through views, with the options `keep_min`, `keep_max` and `gene_dropout`."""

    keep_min: float
    keep_max: float
    gene_dropout: float

    def _set_views(self, keep_min: float, keep_max: float, gene_dropout: float) -> None:
        """Check and keep the options of views.

        Raises
        ------
        OptionError
            If one of them cannot be used.
        """
        for name, value in {"keep_min": keep_min, "keep_max": keep_max, "gene_dropout": gene_dropout}.items():
            check_share(name, value)
        if not 0 < keep_min <= keep_max <= 1:
            raise OptionError(
                f"keep_min={keep_min} and keep_max={keep_max} must satisfy 0 < keep_min <= keep_max <= 1."
            )
        if not 0 <= gene_dropout < 1:
            raise OptionError(f"gene_dropout={gene_dropout} is not in [0, 1).")
        self.keep_min, self.keep_max = float(keep_min), float(keep_max)
        self.gene_dropout = float(gene_dropout)

    def _views(self, blocks: Sequence[CellBlock], tokenizer: Tokenizer, *, epoch: int, seed: int) -> TokenBatch:
        """Tokenise a view of each block, one block after the other; each place draws random numbers of its own."""
        keep, dropout = (self.keep_min, self.keep_max), (0.0, self.gene_dropout)
        parts = [
            tokenizer.ragged(thin(block, keep=keep, gene_dropout=dropout, seed=seed, epoch=epoch, view=view))
            for view, block in enumerate(blocks)
        ]
        return pad(concatenate(parts))
