"""Genes with their expression as a continuous value."""

from __future__ import annotations

from scforge.data.cells import CellBlock
from scforge.tokenizers._expression import keep, log1p_cp10k
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.batch import RaggedTokens
from scforge.tokenizers.registry import register_tokenizer

__all__ = ["ContinuousProjectionTokenizer"]


@register_tokenizer("continuous_projection")
class ContinuousProjectionTokenizer(Tokenizer):
    """Present the expressed genes of a cell in vocabulary order, each with its log1p CP10K value.

    A model projects the value (a transformer adds it to the gene embedding; ``gene_pooling`` weights the embedding by
    it). The library size counts all genes of the data, also those outside the vocabulary.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from scforge.data import GeneVocab
    >>> tokenizer = ContinuousProjectionTokenizer(GeneVocab.from_genes(["A", "B", "C"]), append_cls=False)
    >>> batch = tokenizer(csr_matrix(np.array([[1, 0, 3]])))
    >>> batch["input_ids"].tolist(), batch["values"].round(decimals=2).tolist()
    ([[4, 6]], [[7.820000171661377, 8.920000076293945]])
    """

    default_max_len = None
    ordered_by_gene = True

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        values = log1p_cp10k(block)
        indptr, kept = keep(block.indptr, block.counts, block, self.most_genes)
        return RaggedTokens(indptr, block.genes[kept] + self.vocab.n_special, values[kept])
