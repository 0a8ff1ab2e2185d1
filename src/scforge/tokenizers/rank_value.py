"""Genes in the order of their expression, as Geneformer (Theodoris et al. 2023) presents a cell."""

from __future__ import annotations

import numba
import numpy as np

from scforge.data.cells import CellBlock
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers.base import RaggedTokens, Tokenizer, log1p_cp10k, take_highest
from scforge.tokenizers.registry import register_tokenizer

__all__ = ["RankValueTokenizer"]


@register_tokenizer("rank_value")
class RankValueTokenizer(Tokenizer):
    """Rank the expressed genes of a cell by ``count / median`` and present them from high to low.

    The median is that of the nonzero library-size-normalised values of the gene, where the vocabulary has it; it puts
    genes that are high everywhere behind those that are high here. The library size is the same for all genes of a
    cell and so does not change the order. Ties go by token id. ``values`` are log1p CP10K.

    Parameters
    ----------
    vocab
        The genes, with their `medians` if `use_medians`.
    max_len
        Most tokens of a cell, CLS included; the top of the ranking is kept. None takes 2,048.
    append_cls
        Put a CLS token before the genes.
    use_medians
        Divide by the median of the gene before ranking; otherwise rank the counts.

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

    def __init__(
        self, vocab: GeneVocab, *, max_len: int | None = None, append_cls: bool = True, use_medians: bool = True
    ) -> None:
        super().__init__(vocab, max_len=max_len, append_cls=append_cls)
        self.use_medians = bool(use_medians)
        if self.use_medians and vocab.medians is None:
            raise OptionError(
                "use_medians=True but the vocabulary has no medians; add them with vocab.with_medians(...), "
                "or pass use_medians=False."
            )
        self._medians = vocab.medians if self.use_medians else np.ones(vocab.n_genes)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        values = log1p_cp10k(block.indptr, block.counts, block.totals)
        keys = _scaled(block.genes, block.counts, self._medians)
        return RaggedTokens(*take_highest(block.indptr, block.genes, values, keys, self.most_genes, True))


@numba.njit(cache=True)
def _scaled(genes, counts, medians):
    keys = np.empty(len(genes), dtype=np.float64)
    for entry in range(len(genes)):
        keys[entry] = counts[entry] / medians[genes[entry]]
    return keys
