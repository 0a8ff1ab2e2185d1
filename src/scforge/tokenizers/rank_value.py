"""Genes in the order of their expression, as Geneformer (Theodoris et al. 2023) presents a cell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from scforge._checks import check_bool
from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.data.mapping import GeneMap
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers._expression import check_transform, expression, transformed
from scforge.tokenizers._ranking import LARGEST, Scales, rank_cells, rank_padded
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.batch import RaggedTokens, TokenBatch
from scforge.tokenizers.geneformer import MODEL_INPUT, geneformer_columns, geneformer_vocab
from scforge.tokenizers.registry import register_tokenizer

if TYPE_CHECKING:
    import pandas as pd
    from scipy import sparse

__all__ = ["RankValueTokenizer"]


@register_tokenizer("rank_value")
class RankValueTokenizer(Tokenizer):
    """Rank the expressed genes of a cell by ``count / total * 1e4 / median`` and present them from high to low.

    The median is that of the nonzero library-size-normalised values of the gene, where the vocabulary has it; it puts
    genes that are high everywhere behind those that are high here. ``values`` are log1p CP10K by default.

    Where two genes stand tells something of their medians, so masking puts hidden tokens behind the others (see
    :class:`~scforge.tokenizers.Masking`).

    Parameters
    ----------
    vocab
        The genes, with their `medians` if `use_medians`.
    max_len
        Most tokens of a cell, special tokens included; the top of the ranking is kept. None takes 2,048.
    append_cls, append_eos
        Put a CLS token before the genes, an EOS token behind them.
    use_medians
        Divide by the median of the gene before ranking; otherwise rank the counts.
    parity
        ``"stable"``: equal genes stand in the order of the vocabulary, the same on every machine. ``"exact"``: as
        Geneformer's code orders them, with NumPy's default sort of float64 over the columns of the data, whose order
        among equal keys depends on the CPU. For comparisons; far slower.
    collapse_duplicates
        With ``parity="exact"``, whether columns of one gene are summed (Geneformer V2) or become a token each (V1).
        ``parity="stable"`` always sums them.
    transform, target_sum
        Values of genes, as of :class:`~scforge.tokenizers.ContinuousProjectionTokenizer`; ranks do not depend on them.

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
                "use_medians=True but the vocabulary has no medians; add them with vocab.with_medians(...), "
                "or pass use_medians=False."
            )
        if parity not in ("stable", "exact"):
            raise OptionError(f"parity={parity!r} is not known; choose 'stable' or 'exact'.")
        if parity == "stable" and not check_bool("collapse_duplicates", collapse_duplicates):
            raise OptionError(
                "collapse_duplicates=False needs parity='exact'; parity='stable' sums columns of one gene."
            )
        self.parity = parity
        self.collapse_duplicates = check_bool("collapse_duplicates", collapse_duplicates)
        medians = vocab.medians if self.use_medians else None
        if medians is not None and not (medians.min() >= 1 / LARGEST and medians.max() <= LARGEST):
            raise OptionError(
                f"the vocabulary has medians from {medians.min():g} to {medians.max():g}; "
                f"those of expression lie between {1 / LARGEST:g} and {LARGEST:g}."
            )
        self._scales = Scales.of(np.ones(vocab.n_genes) if medians is None else 1.0 / medians)

    @classmethod
    def from_geneformer(
        cls,
        tokens_medians: pd.DataFrame | str | os.PathLike[str] | Sequence[Mapping[str, float]],
        version: str = "V2",
        ensembl_map: pd.DataFrame | str | os.PathLike[str] | Mapping[str, str] | None = None,
        parity: str = "stable",
    ) -> RankValueTokenizer:
        """Make the tokenizer of a published Geneformer, with its token ids.

        V1 has 2,048 gene tokens and no special ones; V2 has 4,096 tokens with CLS in front and EOS at the end. Genes
        that are not in the dictionary are left out, but their counts stay in the library size.

        Parameters
        ----------
        tokens_medians
            The published dictionaries: the two of them, gene to token and gene to median, as a tuple, or a table (or a
            parquet or CSV file of it) with the columns ``gene_id``, ``token`` and ``median``. Geneformer publishes
            pickle files; scforge never unpickles, so load those yourself with ``pickle.load`` if you trust them.
        version
            ``"V1"`` or ``"V2"``.
        ensembl_map
            Former Ensembl ids to current ones (V2): a table or file with the columns ``ensembl_id`` and ``gene_id``, or
            a dictionary.
        parity
            ``"stable"`` or ``"exact"``, see the class.

        Raises
        ------
        OptionError
            If the version is unknown, or an argument is of a type that cannot be used.
        MissingFileError
            If a file does not exist.
        DataError
            If the dictionaries are not those of a Geneformer.

        Notes
        -----
        A model of these tokens is made of the vocabulary and the options of the tokenizer::

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
        if not isinstance(version, str) or version not in MODEL_INPUT:
            raise OptionError(f"version={version!r} is not known; choose 'V1' or 'V2'.")
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
        indptr, ids, values = rank_cells(block, self._scales, self.most_genes, self.vocab.n_special)
        if not self._usual:
            counts = np.expm1(values.astype(np.float64)) * np.repeat(
                np.maximum(block.totals, 1.0) / TARGET_SUM, np.diff(indptr)
            )
            whole = np.rint(counts)
            counts = np.where(np.abs(counts - whole) < 1e-5 * whole, whole, counts)
            values = transformed(counts, indptr, block.totals, self.transform, self.target_sum)
        return RaggedTokens(indptr, ids, values)

    @property
    def _usual(self) -> bool:
        return (self.transform, self.target_sum) == ("log1p_cp10k", TARGET_SUM)

    def _batch(self, block: CellBlock) -> TokenBatch:
        # Whoever subclasses this to rank otherwise overrides _tokenize.
        if self.parity == "exact" or not self._usual or type(self)._tokenize is not RankValueTokenizer._tokenize:
            return super()._batch(block)
        arrays = rank_padded(block, self._scales, self.most_genes, self.vocab.n_special, *self._frame)
        ids, mask, values = map(torch.from_numpy, arrays)
        return {"input_ids": ids, "attention_mask": mask, "values": values}

    def _tokenize_mapped(self, counts: sparse.csr_matrix, gene_map: GeneMap, totals: np.ndarray) -> RaggedTokens:
        if self.parity == "stable":
            return super()._tokenize_mapped(counts, gene_map, totals)
        # The order of the columns is the order of equal genes, so it must not become that of the vocabulary.
        ordered, genes = geneformer_columns(counts, gene_map.columns, collapse=self.collapse_duplicates)
        return self._exact(ordered.indptr.astype(np.int64), genes[ordered.indices], ordered.data, totals)

    def _exact(self, indptr: np.ndarray, genes: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> RaggedTokens:
        """Rank as Geneformer's code does, cell by cell."""
        block = CellBlock(indptr, genes, counts.astype(np.float32), totals, rows=np.arange(len(indptr) - 1))
        values = expression(block, self.transform, self.target_sum)
        chosen = [np.empty(0, dtype=np.int64)]
        out_indptr = np.zeros(len(indptr), dtype=np.int64)
        for cell, (start, stop) in enumerate(zip(indptr[:-1], indptr[1:], strict=True)):
            scaled = counts[start:stop].astype(np.float64) * (1.0 / max(totals[cell], 1.0))
            keys = scaled * TARGET_SUM * self._scales.inverse[genes[start:stop]]
            order = np.argsort(-keys)[: self.most_genes]
            chosen.append(start + order)
            out_indptr[cell + 1] = out_indptr[cell] + len(order)
        taken = np.concatenate(chosen)
        return RaggedTokens(out_indptr, (genes[taken] + self.vocab.n_special).astype(np.int32), values[taken])
