"""The scGPT tokenizer: genes with their expression in quantile bins of each cell."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from scipy import sparse

from scforge._checks import check_bool, check_choice, check_count, check_seed
from scforge.data.cells import CellBlock, content_keys
from scforge.data.sampling import uniform
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError
from scforge.tokenizers._expression import keep, log1p_cp10k, with_zeros
from scforge.tokenizers.base import RaggedTokens, Tokenizer, register_tokenizer

SIDES = ("both", "one", "tahoe")

_TABLE = 1024
"""Integer counts below this limit are binned with a frequency table of the cell, which avoids sorting."""

_STREAM = 0x62696E73  # "bins": its random numbers are others than those of masks, samples and views


def quantile_bins(
    counts: sparse.csr_matrix, *, n_bins: int = 51, side: str = "both", random_state: int = 0
) -> sparse.csr_matrix:
    """Bin the nonzero entries of each cell by the quantiles of the cell, as in scGPT's preprocessing.

    Parameters
    ----------
    counts
        Nonnegative counts, or any increasing function of them, shape (B, n_vars).
    n_bins
        Number of bins, including the bin for zeros.
    side
        Treatment of values that span several bins. ``"both"`` spreads them over these bins at random, ``"one"`` assigns
        the highest of these bins, and ``"tahoe"`` assigns the lowest, as in Tahoe-x1.
    random_state
        Random seed for ``"both"``. The bins are the same as in scGPT's code after ``np.random.seed(random_state)``,
        with one random number for each nonzero entry, cell by cell.

    Returns
    -------
    Bins from 1 to ``n_bins - 1`` for the entries of `counts`, int64, with sorted indices and summed duplicates.

    Raises
    ------
    DataError
        If `counts` contains a negative value or NaN.

    Examples
    --------
    >>> cell = sparse.csr_matrix([[0, 1, 1, 1, 2, 3, 5, 8, 0, 13]])
    >>> quantile_bins(cell, side="one").toarray()
    array([[ 0, 15, 15, 15, 22, 29, 36, 43,  0, 50]])
    >>> quantile_bins(cell, random_state=0).toarray()
    array([[ 0,  7,  5,  6, 22, 29, 36, 43,  0, 50]])
    """
    check_count("n_bins", n_bins, "bins", least=3)
    check_choice("side", side, SIDES)
    matrix = sparse.csr_matrix(counts, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    if not np.isfinite(matrix.data).all() or (len(matrix.data) and matrix.data.min() < 0):
        raise DataError(
            "contains negative, missing or infinite values; pass raw counts, or a monotonic transformation of "
            "counts such as log1p.",
            argument="counts",
        )
    draws = np.random.RandomState(random_state).rand(matrix.nnz if side == "both" else 0)
    data = matrix.data if matrix.dtype in (np.float32, np.float64) else matrix.data.astype(np.float64)
    bins = bin_entries(matrix.indptr.astype(np.int64), data, n_bins, side, draws=draws)
    return sparse.csr_matrix((bins.astype(np.int64), matrix.indices, matrix.indptr), shape=matrix.shape)


def bin_entries(
    indptr: np.ndarray,
    counts: np.ndarray,
    n_bins: int,
    side: str,
    *,
    draws: np.ndarray | None = None,
    keys: np.ndarray | None = None,
) -> np.ndarray:
    """Return the bin of each entry, int32, shape (Z,).

    Parameters
    ----------
    indptr, counts
        Row boundaries, and positive entries.
    n_bins, side
        See :func:`quantile_bins`.
    draws
        Random number of each entry for ``"both"``, shape (Z,).
    keys
        Random key of each cell for ``"both"``, instead of `draws`, shape (B,).
    """
    shares = np.linspace(0, 1, n_bins - 1)
    draws = np.empty(0, dtype=np.float64) if draws is None else draws
    keys = np.empty(0, dtype=np.uint64) if keys is None else keys
    bins = np.empty(len(counts), dtype=np.int32)
    _bin(indptr, counts, shares, SIDES.index(side), draws, keys, bins)
    return bins


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _bin(indptr, counts, shares, side, draws, keys, bins):
    table = np.empty(_TABLE + 1, dtype=np.int64)
    below_of = np.empty(_TABLE + 1, dtype=np.int32)
    reached_of = np.empty(_TABLE + 1, dtype=np.int32)
    edges = np.empty(len(shares), dtype=np.float64)
    drawn = side == 0
    for cell in range(len(indptr) - 1):
        start, stop = np.uint64(indptr[cell]), np.uint64(indptr[cell + 1])
        n = stop - start
        if n == 0:
            continue
        lowest = highest = counts[start]
        whole = True
        for entry in range(start, stop):
            lowest = min(lowest, counts[entry])
            highest = max(highest, counts[entry])
            whole = whole and np.floor(counts[entry]) == counts[entry]
        small = whole and lowest >= 0 and highest < _TABLE
        ranked = counts[start:stop] if small else np.sort(counts[start:stop])
        if small:
            table[: np.uint64(highest) + np.uint64(2)] = 0
            for entry in range(start, stop):
                table[np.uint64(counts[entry]) + np.uint64(1)] += 1
            _edges_from_table(table, np.int64(highest), np.int64(n), shares, edges)
            _digitize_table(np.int64(highest), edges, below_of, reached_of)
        else:
            _edges_from_sorted(ranked, shares, edges)
        for entry in range(start, stop):
            if small:
                below = below_of[np.uint64(counts[entry])]
                reached = reached_of[np.uint64(counts[entry])]
            else:
                below = np.int32(np.searchsorted(edges, np.float64(counts[entry])))
                reached = np.int32(np.searchsorted(edges, np.float64(counts[entry]), side="right"))
            if side == 1 or (drawn and below == reached):
                bins[entry] = reached
            elif drawn:
                draw = draws[entry] if len(draws) else uniform(keys[cell], entry - start)
                bins[entry] = np.int32(np.ceil(draw * (below - reached) + reached))
            else:
                bins[entry] = below + 1


@numba.njit(cache=True, nogil=True)
def _between(low, high, share):
    """Interpolate bit for bit like NumPy's quantile; the difference has the precision of the data."""
    return high - (high - low) * (1.0 - share) if share >= 0.5 else low + (high - low) * share


@numba.njit(cache=True, nogil=True)
def _edges_from_sorted(ranked, shares, edges):
    last = len(ranked) - 1
    for i in range(len(shares)):
        position = last * shares[i]
        lower: int = min(int(np.floor(position)), last)
        edges[i] = _between(ranked[lower], ranked[min(lower + 1, last)], position - np.floor(position))


@numba.njit(cache=True, nogil=True)
def _edges_from_table(table, highest, n, shares, edges):
    """Compute edges like :func:`_edges_from_sorted`, but from the frequency of each count ``c`` in ``table[c + 1]``."""
    last = n - 1
    count = 0
    upto = table[1]  # entries with at most `count`
    above = 0
    for i in range(len(shares)):
        position = last * shares[i]
        lower: int = min(int(np.floor(position)), last)
        while upto <= lower:
            count += 1
            upto += table[count + 1]
        above = count
        reach = upto
        while reach <= min(lower + 1, last):
            above += 1
            reach += table[above + 1]
        edges[i] = _between(np.float64(count), np.float64(above), position - np.floor(position))


@numba.njit(cache=True, nogil=True)
def _digitize_table(highest, edges, below_of, reached_of):
    below, reached = 0, 0
    for count in range(highest + 1):
        while below < len(edges) and edges[below] < count:
            below += 1
        while reached < len(edges) and edges[reached] <= count:
            reached += 1
        below_of[count] = below
        reached_of[count] = reached


@register_tokenizer("binned_expression")
class BinnedExpressionTokenizer(Tokenizer):
    """Represent a cell by its genes in vocabulary order, each with the bin of its expression.

    By default, bins are quantiles of the nonzero counts of each cell, so they do not depend on library size. Bin 0 is
    for genes without counts. ``bin_ids`` contains the bins as integers, and ``values`` contains them as floats. With
    `edges`, bins are the same in all cells.

    Parameters
    ----------
    vocab
        The genes.
    max_len
        Maximum number of tokens per cell, including special tokens. If None, uses 2,048.
    append_cls, append_eos
        Whether to add a CLS token before the genes, and an EOS token after them.
    n_bins
        Number of bins, including bin 0. If None, uses 51, or the number that `edges` define.
    side
        Treatment of counts that span several quantiles: ``"both"`` spreads them over these bins at random (scGPT's
        default), ``"one"`` uses the highest of these bins, and ``"tahoe"`` uses the lowest (Tahoe-x1). See
        :func:`scforge.tokenizers.binned_expression.quantile_bins`.
    edges
        Ascending log1p CP10K values that separate the bins in all cells. The bin of a gene is 1 plus the number of
        edges that its value reaches.
    include_zero_genes
        Whether to include measured genes without counts. Do not use this to predict the identity of masked genes,
        because the masked genes would then be exactly the missing genes.
    truncation
        Genes to keep if a cell has too many. ``"random"`` resamples genes in each epoch, as in scGPT. ``"highest"``
        keeps the most expressed genes, and then a sample of genes without counts, up to the limit.
    seed
        Random seed. Random choices for a cell depend only on the seed, the epoch and the cell.

    Raises
    ------
    OptionError
        If an option is invalid.

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
            ascending = np.asarray(edges, dtype=np.float64)
            if ascending.ndim != 1 or not len(ascending) or not (np.diff([0, *ascending, np.inf]) > 0).all():
                raise OptionError(
                    "is invalid; pass one or more log1p CP10K values above 0 in ascending order.", edges=list(edges)
                )
            edges = ascending.tolist()
            if n_bins not in (None, len(edges) + 2):
                raise OptionError(f", but {len(edges)} edges define {len(edges) + 2} bins; omit n_bins.", n_bins=n_bins)
        self.edges = edges
        self.n_bins = len(edges) + 2 if edges is not None else 51 if n_bins is None else n_bins
        check_count("n_bins", self.n_bins, "bins", least=3)
        self.side = check_choice("side", side, SIDES)
        self.include_zero_genes = check_bool("include_zero_genes", include_zero_genes)
        self.truncation = check_choice("truncation", truncation, ["random", "highest"])
        self.samples = truncation == "random"
        self.seed = check_seed(seed)
        self.lists_all_genes = self.include_zero_genes

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        if self.edges is not None:
            reached = np.searchsorted(np.array(self.edges, dtype=np.float32), log1p_cp10k(block), side="right")
            bins = (reached + 1).astype(np.int32)
        else:
            keys = content_keys(block, seed=self.seed, stream=_STREAM) if self.side == "both" else None
            bins = bin_entries(block.indptr, block.counts, self.n_bins, self.side, keys=keys)
        if self.include_zero_genes:
            indptr, genes, (counts, bins) = with_zeros(block, self.vocab.n_genes, (block.counts, bins))
        else:
            indptr, genes, counts = block.indptr, block.genes, block.counts
        indptr, kept = keep(indptr, counts, block, self.most_genes, sample=self.samples, seed=self.seed)
        chosen = bins[kept]
        return RaggedTokens(indptr, genes[kept] + self.vocab.n_special, chosen.astype(np.float32), {"bin_ids": chosen})
