"""The Geneformer tokenizer: genes ranked by their expression relative to a median."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numba
import numpy as np
import torch

from scforge._checks import check_bool, check_choice
from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.data.genes import GeneMap
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers._expression import MEMO, check_transform, expression, finish_sort, kept_indptr, ranked
from scforge.tokenizers.base import RaggedTokens, TokenBatch, Tokenizer, register_tokenizer
from scforge.tokenizers.geneformer import MODEL_INPUT, geneformer_columns, geneformer_vocab

if TYPE_CHECKING:
    import pandas as pd
    from scipy import sparse


TABLE_CELLS = 4096
"""Number of table cells: 128 per power of two, from 2^-16 to 2^16. Keys beyond this range use the end cells."""

FIRST = (127 - 16) << 7
"""Leading bits (sign, exponent and seven of the mantissa) of the first cell of the table."""

CLOSE = 8
"""Upper bound of the error in single precision, in units in the last place."""

LARGEST = 1e20
"""Medians must be between this value and its inverse, so that keys are normal numbers in single precision."""

_SAMPLE = 8192
"""Approximate number of entries per block from which the table is computed; one in 32 in a small block."""

_MAX = 2**16
"""Genes and counts below this limit are packed together with the keys."""

_APART = 1e-6
"""Minimum relative difference of medians whose keys cannot round to the same number (eight units in last place)."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def rank_packed(
    indptr, genes, counts, totals, inverse, single, distinct, table, n_buckets, longest, n_special,
    out_starts, out_sizes, out_ids, out_values,
):  # fmt: skip
    """Write the highest-ranked genes of each cell.

    Set `distinct` if equal keys with equal counts imply equal medians.
    """
    one: Any = np.uint64(1)
    low16, shift16, shift32 = np.uint64(0xFFFF), np.uint64(16), np.uint64(32)
    keys = np.empty(longest, dtype=np.float32)
    bits = keys.view(np.uint32)
    places = np.empty(longest + 1, dtype=np.int32)
    starts = np.empty(n_buckets + 2, dtype=np.int32)
    packed = np.empty(longest, dtype=np.uint64)
    memo = np.empty(MEMO, dtype=np.float32)
    lowest_bucket, slope = table[0], table[1]
    for cell in range(len(indptr) - 1):
        start = np.uint64(indptr[cell])
        size = np.uint64(indptr[cell + 1]) - start
        if size == 0:
            continue
        for i in range(size):
            keys[i] = counts[start + i] * single[np.uint32(genes[start + i])]

        # Deal the keys into buckets, from high to low.
        starts[:] = 0
        for i in range(size):
            index = np.uint32(
                min(max(np.int32(bits[i] >> np.uint32(16)) - np.int32(FIRST), np.int32(0)), np.int32(TABLE_CELLS - 1))
            )
            within = np.float32(np.int32(bits[i] & np.uint32(0xFFFF)))
            bucket = np.int32(lowest_bucket[index] - within * slope[index])
            places[i] = bucket
            starts[np.uint32(bucket) + np.uint32(1)] += 1
        before = np.int32(0)
        for b in range(np.uint32(n_buckets + 1)):
            before += starts[b]
            starts[b] = before
        for i in range(size):
            slot = np.uint32(starts[np.uint32(places[i])])
            payload = (np.uint64(np.int32(counts[start + i])) << shift16) | np.uint64(genes[start + i])
            packed[slot] = (np.uint64(~bits[i]) << shift32) | payload
            starts[np.uint32(places[i])] = slot + 1

        finish_sort(packed, size)

        # Compare close keys exactly. They are collected first, since no processor could guess which are close.
        n_close = np.uint64(0)
        for p in range(one, size):
            places[n_close] = p
            close = (packed[p] >> shift32) - (packed[p - one] >> shift32) <= np.uint64(CLOSE)
            equal = distinct & ((packed[p] >> shift16) == (packed[p - one] >> shift16))
            n_close += np.uint64(close & (not equal))
        share = 1.0 / max(totals[cell], 1.0)
        for c in range(n_close):
            at: Any = np.uint64(places[c])
            following = True
            while following:
                entry = packed[at]
                above = packed[at - one]
                gene, count = np.uint32(entry & low16), (entry >> shift16) & low16
                median = inverse[gene]
                q = at
                if count != (above >> shift16) & low16 or median != inverse[np.uint32(above & low16)]:
                    key = ((np.float64(count) * share) * TARGET_SUM) * median
                    while q > 0 and np.int64(entry >> shift32) - np.int64(packed[q - one] >> shift32) <= CLOSE:
                        above = packed[q - one]
                        higher = np.uint32(above & low16)
                        other = ((np.float64((above >> shift16) & low16) * share) * TARGET_SUM) * inverse[higher]
                        if other > key or (other == key and higher < gene):
                            break
                        packed[q] = above
                        q -= one
                    packed[q] = entry
                # What equals an entry that went up has to follow it.
                at += one
                following = q + one < at and at < size and (packed[at] >> shift16) == (entry >> shift16)

        out = np.uint64(out_starts[cell])
        n_kept = np.uint64(out_sizes[cell])
        for p in range(n_kept):
            out_ids[out + p] = np.int64(packed[p] & low16) + n_special
        # Nearly all entries of a cell are small counts, whose values are computed once.
        memo[:] = -1.0
        scale = TARGET_SUM * share
        for p in range(n_kept):
            count = (packed[p] >> shift16) & low16
            if count >= np.uint64(MEMO):
                out_values[out + p] = np.log1p(np.float64(count) * scale)
                continue
            if memo[count] < 0:
                memo[count] = np.log1p(np.float64(count) * scale)
            out_values[out + p] = memo[count]


@numba.njit(cache=True, nogil=True)
def _fill_around(sizes, first, last, ids, mask, values):
    before = 1 if first >= 0 else 0
    for cell in range(len(sizes)):
        if before:
            ids[cell, 0] = first
            values[cell, 0] = 0
        stop = before + sizes[cell]
        if last >= 0:
            ids[cell, stop] = last
            values[cell, stop] = 0
            stop += 1
        ids[cell, stop:] = 0
        values[cell, stop:] = 0
        mask[cell, :stop] = True
        mask[cell, stop:] = False


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _learn(indptr, genes, counts, single, n_buckets):
    """Return the bucket of the lowest key in each table cell, and the number of buckets per unit of its low bits."""
    seen = np.zeros(TABLE_CELLS, dtype=np.float64)
    key = np.empty(1, dtype=np.float32)
    bits = key.view(np.uint32)
    n_seen = 0
    for entry in range(0, indptr[-1], max(indptr[-1] // _SAMPLE, min(32, 1 + indptr[-1] // 1024))):
        key[0] = counts[entry] * single[genes[entry]]
        index: Any = min(max(np.int64(bits[0] >> np.uint32(16)) - FIRST, 0), TABLE_CELLS - 1)
        seen[index] += 1
        n_seen += 1
    used = np.flatnonzero(seen)
    first, last = (used[0], used[-1]) if n_seen else (0, 0)
    table = np.zeros((2, TABLE_CELLS), dtype=np.float32)
    above = 0.0
    for cell in range(TABLE_CELLS - 1, -1, -1):
        # A tenth is spread evenly, for keys that the sample has missed.
        share = 0.9 * seen[cell] / max(n_seen, 1) + (0.1 / (last - first + 1) if first <= cell <= last else 0.0)
        above += share
        table[0, cell] = above * (n_buckets - 1)
        table[1, cell] = share * (n_buckets - 1) / 65536.0
    return table


@register_tokenizer("rank_value")
class RankValueTokenizer(Tokenizer):
    """Rank the expressed genes of a cell by ``count / total * 1e4 / median``, from high to low.

    If the vocabulary contains medians, the median is computed over the nonzero library-size-normalized values of the
    gene. Genes with high expression in all cells are therefore ranked below genes with high expression in this cell.
    ``values`` are log1p CP10K by default.

    The positions of two genes contain information about their medians, so masking moves masked tokens to the end (see
    :class:`~scforge.tokenizers.Masking`).

    Parameters
    ----------
    vocab
        The genes, with their `medians` if `use_medians`.
    max_len
        Maximum number of tokens per cell, including special tokens. The top of the ranking is kept. If None, uses
        2,048.
    append_cls, append_eos
        Whether to add a CLS token before the genes, and an EOS token after them.
    use_medians
        Whether to divide by the median of the gene before ranking. If false, ranks the counts.
    parity
        With ``"stable"``, ties are in vocabulary order on every machine. With ``"exact"``, ties are in the same order
        as in Geneformer's code, which uses NumPy's default sort of float64 over the columns of the data. The order of
        equal keys then depends on the CPU. ``"exact"`` is meant for comparisons, and is much slower.
    collapse_duplicates
        With ``parity="exact"``, whether columns of the same gene are summed (Geneformer V2) or become separate tokens
        (V1). ``parity="stable"`` always sums them.
    transform, target_sum
        Values of genes, see :class:`~scforge.tokenizers.ContinuousProjectionTokenizer`. Ranks do not depend on them.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from scforge.data import GeneVocab
    >>> tokenizer = RankValueTokenizer(GeneVocab.from_genes(["A", "B", "C"]), use_medians=False)
    >>> tokenizer(csr_matrix(np.array([[1, 0, 5]])))["input_ids"]
    tensor([[3, 6, 4]])
    """

    needs_medians = True
    ordered_by_gene = True
    ranks = True

    def __init__(
        self,
        vocab: GeneVocab,
        *,
        max_len: int | None = None,
        append_cls: bool = True,
        append_eos: bool = False,
        use_medians: bool = True,
        parity: str = "stable",
        collapse_duplicates: bool = True,
        transform: str = "log1p_cp10k",
        target_sum: float = TARGET_SUM,
    ) -> None:
        super().__init__(vocab, max_len=max_len, append_cls=append_cls, append_eos=append_eos)
        self.transform, self.target_sum = transform, check_transform(transform, target_sum)
        self.use_medians = check_bool("use_medians", use_medians)
        if self.use_medians and vocab.medians is None:
            raise OptionError(
                ", but the vocabulary has no medians; add them with vocab.with_medians, or pass use_medians=False.",
                use_medians=True,
            )
        self.parity = check_choice("parity", parity, ["stable", "exact"])
        if parity == "stable" and not check_bool("collapse_duplicates", collapse_duplicates):
            raise OptionError(
                "requires parity='exact', because parity='stable' sums the columns of each gene; pass parity='exact'.",
                collapse_duplicates=False,
            )
        self.collapse_duplicates = check_bool("collapse_duplicates", collapse_duplicates)
        medians = vocab.medians if self.use_medians else None
        if medians is not None and not (medians.min() >= 1 / LARGEST and medians.max() <= LARGEST):
            raise OptionError(
                f"the vocabulary has medians from {medians.min():g} to {medians.max():g}, but medians of expression "
                f"lie between {1 / LARGEST:g} and {LARGEST:g}; correct the medians with vocab.with_medians."
            )
        # Counts are multiplied by these factors; single precision is enough for a first sort.
        self._inverse = np.ones(vocab.n_genes) if medians is None else 1.0 / medians
        self._single = self._inverse.astype(np.float32)
        factors = np.unique(self._inverse)
        self._distinct = bool((factors[1:] > factors[:-1] * (1 + _APART)).all())

    @classmethod
    def from_geneformer(
        cls,
        tokens_medians: pd.DataFrame | str | os.PathLike[str] | Sequence[Mapping[str, float]],
        version: str = "V2",
        ensembl_map: pd.DataFrame | str | os.PathLike[str] | Mapping[str, str] | None = None,
        parity: str = "stable",
    ) -> RankValueTokenizer:
        """Create the tokenizer of a published Geneformer model, with its token ids.

        V1 uses 2,048 gene tokens without special tokens; V2 uses 4,096 tokens with CLS at the start and EOS at the end.
        Genes that are not in the dictionary are left out, but their counts stay in the library size.

        Parameters
        ----------
        tokens_medians
            The published dictionaries: a tuple of two dictionaries (gene to token, and gene to median), or a table, or
            its parquet or CSV file, with the columns ``gene_id``, ``token`` and ``median``. Geneformer publishes pickle
            files. scforge never unpickles files, so load them with ``pickle.load`` if you trust them.
        version
            ``"V1"`` or ``"V2"``.
        ensembl_map
            A mapping from former to current Ensembl ids (V2): a table or file with the columns ``ensembl_id`` and
            ``gene_id``, or a dictionary.
        parity
            ``"stable"`` or ``"exact"``, see the class.

        Raises
        ------
        OptionError
            If the version is unknown, or the type of an argument is not supported.
        MissingFileError
            If a file does not exist.
        DataError
            If the dictionaries are not from a Geneformer model.

        Notes
        -----
        To create a model for these tokens, pass the vocabulary and the options of the tokenizer::

            Encoder(adata, vocab=tokenizer.vocab, tokenizer={"name": "rank_value", **tokenizer.config()})

        Examples
        --------
        >>> from scipy.sparse import csr_matrix
        >>> tokens = {"<pad>": 0, "<mask>": 1, "ENSG00000000003": 2, "ENSG00000000005": 3}
        >>> medians = {"ENSG00000000003": 2.0, "ENSG00000000005": 0.5}
        >>> tokenizer = RankValueTokenizer.from_geneformer((tokens, medians), version="V1")
        >>> tokenizer(csr_matrix([[3, 1]]), ["ENSG00000000003.15", "ENSG00000000005"])["input_ids"]
        tensor([[3, 2]])
        """
        check_choice("version", version, MODEL_INPUT)
        vocab = geneformer_vocab(tokens_medians, version, ensembl_map)
        return cls(
            vocab,
            max_len=MODEL_INPUT[version],
            append_cls=version == "V2",
            append_eos=version == "V2",
            parity=parity,
            collapse_duplicates=version == "V2" or parity == "stable",
        )

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        if self.parity == "exact":
            return self._exact(block.indptr, block.genes, block.counts, block.totals)
        most, n_special = self.most_genes, self.vocab.n_special
        if self._packs(block):
            indptr, longest = kept_indptr(block.indptr, most)
            ids, values = np.empty(indptr[-1], dtype=np.int32), np.empty(indptr[-1], dtype=np.float32)
            self._rank_into(block, longest, indptr[:-1], np.diff(indptr), ids, values)
            return RaggedTokens(indptr, ids, values)
        shares = np.repeat(1.0 / np.maximum(block.totals, 1.0), np.diff(block.indptr))
        scaled = block.counts.astype(np.float64) * shares * TARGET_SUM
        values = expression(block, self.transform, self.target_sum)
        return RaggedTokens(*ranked(block, scaled, self._inverse, values, most, n_special))

    def _packs(self, block: CellBlock) -> bool:
        """Return whether the fast kernel, which only computes log1p CP10K values, can rank a block."""
        usual = self.transform == "log1p_cp10k" and self.target_sum == TARGET_SUM
        # Genes and counts are packed together with their keys; nearly all are small enough.
        return usual and len(self._inverse) <= _MAX and bool(block.counts.max(initial=0) < _MAX)

    def _rank_into(
        self,
        block: CellBlock,
        longest: int,
        starts: np.ndarray,
        sizes: np.ndarray,
        ids: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Write the `sizes` highest-ranked genes of each cell to `ids` and `values`, starting at `starts`."""
        n_buckets = max(64, 1 << int(longest - 1).bit_length()) if longest else 64
        table = _learn(block.indptr, block.genes, block.counts, self._single, n_buckets)
        rank_packed(
            block.indptr, block.genes, block.counts, block.totals, self._inverse, self._single, self._distinct, table,
            n_buckets, longest, self.vocab.n_special, starts, sizes, ids, values,
        )  # fmt: skip

    def _batch(self, block: CellBlock) -> TokenBatch:
        # Subclasses with another ranking override _tokenize.
        ours = self.parity == "stable" and type(self)._tokenize is RankValueTokenizer._tokenize
        if not ours or not self._packs(block):
            return super()._batch(block)
        # Tokens are written directly into padded arrays, which avoids a second copy.
        first, last = self._frame
        indptr, longest = kept_indptr(block.indptr, self.most_genes)
        sizes = np.diff(indptr)
        before, around = int(first >= 0), int(first >= 0) + int(last >= 0)
        width = max(1, int(sizes.max(initial=0)) + around)
        ids = np.empty((len(sizes), width), dtype=np.int64)
        mask, values = np.empty(ids.shape, dtype=np.bool_), np.empty(ids.shape, dtype=np.float32)
        starts = np.arange(len(sizes), dtype=np.int64) * width + before
        self._rank_into(block, longest, starts, sizes, ids.reshape(-1), values.reshape(-1))
        _fill_around(sizes, first, last, ids, mask, values)
        arrays = {"input_ids": ids, "attention_mask": mask, "values": values}
        return cast(TokenBatch, {name: torch.from_numpy(array) for name, array in arrays.items()})

    def _tokenize_mapped(self, counts: sparse.csr_matrix, gene_map: GeneMap, totals: np.ndarray) -> RaggedTokens:
        if self.parity == "stable":
            return super()._tokenize_mapped(counts, gene_map, totals)
        # The order of the columns is the order of equal genes, so it must not become that of the vocabulary.
        ordered, genes = geneformer_columns(counts, gene_map.columns, collapse=self.collapse_duplicates)
        return self._exact(ordered.indptr.astype(np.int64), genes[ordered.indices], ordered.data, totals)

    def _exact(self, indptr: np.ndarray, genes: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> RaggedTokens:
        """Rank genes as in Geneformer's code, cell by cell."""
        block = CellBlock(indptr, genes, counts.astype(np.float32), totals, rows=np.arange(len(indptr) - 1))
        values = expression(block, self.transform, self.target_sum)
        chosen = [np.empty(0, dtype=np.int64)]
        out_indptr = np.zeros(len(indptr), dtype=np.int64)
        for cell, (start, stop) in enumerate(zip(indptr[:-1], indptr[1:], strict=True)):
            scaled = counts[start:stop].astype(np.float64) * (1.0 / max(totals[cell], 1.0))
            keys = scaled * TARGET_SUM * self._inverse[genes[start:stop]]
            order = np.argsort(-keys)[: self.most_genes]
            chosen.append(start + order)
            out_indptr[cell + 1] = out_indptr[cell] + len(order)
        taken = np.concatenate(chosen)
        return RaggedTokens(out_indptr, (genes[taken] + self.vocab.n_special).astype(np.int32), values[taken])
