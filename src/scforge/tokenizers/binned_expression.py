"""Genes with their expression in bins, as scGPT (Cui et al. 2024) presents a cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scforge._checks import check_bool, check_seed
from scforge.data.cells import CellBlock
from scforge.data.random import content_keys
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers._binning import bin_entries, check_binning
from scforge.tokenizers._expression import keep, log1p_cp10k
from scforge.tokenizers._zeros import with_zeros
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.batch import RaggedTokens
from scforge.tokenizers.registry import register_tokenizer

__all__ = ["BinnedExpressionTokenizer"]

_STREAM = 0x62696E73  # "bins": its random numbers are others than those of masks, samples and views


@register_tokenizer("binned_expression")
class BinnedExpressionTokenizer(Tokenizer):
    """Present the genes of a cell in vocabulary order, each with the bin of its expression.

    By default the bins are the quantiles of the nonzero counts of the cell itself, so they do not depend on its library
    size; bin 0 is for genes without counts. ``bin_ids`` hold the bins, and ``values`` the same as numbers. With `edges`
    the bins are the same in all cells.

    Parameters
    ----------
    vocab
        The genes.
    max_len
        Most tokens of a cell, special tokens included. None takes 2,048.
    append_cls, append_eos
        Put a CLS token before the genes, an EOS token behind them.
    n_bins
        Number of bins, bin 0 included. None takes 51, or what `edges` make.
    side
        What happens to counts that span several quantiles: ``"both"`` spreads them over these bins at random (scGPT's
        default), ``"one"`` takes the highest of the bins, ``"tahoe"`` the lowest (Tahoe-x1); see
        :func:`scforge.tokenizers.quantile_bins`.
    edges
        Bin by these ascending log1p CP10K values in all cells: a gene gets bin 1 plus the number of edges that its
        value reaches.
    include_zero_genes
        Also present the genes that were measured and have no count. Not for predicting which genes are hidden: they
        would be those that are missing.
    truncation
        Which genes are kept of a cell that has too many: ``"random"``, drawn anew each epoch as scGPT does, or
        ``"highest"``, the most expressed, and genes without counts, which are drawn, where there is room left.
    seed
        Seed of what is drawn. What happens to a cell depends on the seed, the epoch and the cell alone.

    Raises
    ------
    OptionError
        If an option cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from scforge.data import GeneVocab
    >>> tokenizer = BinnedExpressionTokenizer(GeneVocab.from_genes(["A", "B", "C"]), n_bins=3, side="one")
    >>> batch = tokenizer(csr_matrix(np.array([[1, 0, 3]])))
    >>> batch["input_ids"].tolist(), batch["bin_ids"].tolist()
    ([[3, 4, 6]], [[0, 1, 2]])
    """

    ordered_by_gene = True

    def __init__(
        self,
        vocab: GeneVocab,
        *,
        max_len: int | None = None,
        append_cls: bool = True,
        append_eos: bool = False,
        n_bins: int | None = None,
        side: str = "both",
        edges: Sequence[float] | None = None,
        include_zero_genes: bool = False,
        truncation: str = "random",
        seed: int = 0,
    ) -> None:
        super().__init__(vocab, max_len=max_len, append_cls=append_cls, append_eos=append_eos)
        if edges is not None:
            edges = _check_edges(edges)
            if n_bins not in (None, len(edges) + 2):
                raise OptionError(
                    f"n_bins={n_bins} but {len(edges)} edges make {len(edges) + 2} bins; leave n_bins out."
                )
        self.edges = edges
        self.n_bins = len(edges) + 2 if edges is not None else 51 if n_bins is None else n_bins
        check_binning(self.n_bins, side)
        if truncation not in ("random", "highest"):
            raise OptionError(f"truncation={truncation!r} is not known; choose 'random' or 'highest'.")
        self.side = side
        self.include_zero_genes = check_bool("include_zero_genes", include_zero_genes)
        self.truncation = truncation
        self.samples = truncation == "random"
        self.seed = check_seed(seed)
        self.lists_all_genes = self.include_zero_genes

    def lengths(self, n_expressed: np.ndarray) -> np.ndarray:
        """Return the number of tokens of cells with `n_expressed` expressed genes (if all genes are measured)."""
        n_genes = np.full_like(n_expressed, self.vocab.n_genes) if self.include_zero_genes else n_expressed
        return super().lengths(n_genes)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        bins = self._bins(block)
        if self.include_zero_genes:
            indptr, genes, (counts, bins) = with_zeros(block, self.vocab.n_genes, (block.counts, bins))
        else:
            indptr, genes, counts = block.indptr, block.genes, block.counts
        indptr, kept = keep(indptr, counts, block, self.most_genes, sample=self.samples, seed=self.seed)
        chosen = bins[kept]
        return RaggedTokens(indptr, genes[kept] + self.vocab.n_special, chosen.astype(np.float32), {"bin_ids": chosen})

    def _bins(self, block: CellBlock) -> np.ndarray:
        """Return the bin of each entry of the block, int32."""
        if self.edges is not None:
            return (
                np.searchsorted(np.array(self.edges, dtype=np.float32), log1p_cp10k(block), side="right") + 1
            ).astype(np.int32)
        keys = content_keys(block, seed=self.seed, stream=_STREAM) if self.side == "both" else None
        return bin_entries(block.indptr, block.counts, self.n_bins, self.side, keys=keys)


def _check_edges(edges: Sequence[float]) -> list[float]:
    if isinstance(edges, str) or not isinstance(edges, Sequence | np.ndarray):
        raise OptionError(f"edges={edges!r} is not a list of log1p CP10K values.")
    try:
        values = [float(edge) for edge in edges]
    except (TypeError, ValueError):
        values = []
    if not values or not np.isfinite(values).all() or (np.diff(values) <= 0).any() or values[0] <= 0:
        raise OptionError(f"edges={list(edges)!r} must be ascending log1p CP10K values above 0, at least one.")
    return values
