"""Genes in the order of the vocabulary, with a power of their share of the counts as value."""

from __future__ import annotations

from typing import Any

import numpy as np

from scforge.data import CellBlock, GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers import RaggedTokens, Tokenizer


class PowerTokenizer(Tokenizer):
    """Present each expressed gene with ``(count / library size * 10,000) ** power``.

    A power of 0.5 makes the variance of counts about the same at all means.

    Parameters
    ----------
    vocab
        The genes.
    power
        Between 0 and 1.
    **options
        ``max_len``, ``append_cls``, ``append_eos``.
    """

    ordered_by_gene = True

    def __init__(self, vocab: GeneVocab, *, power: float = 0.5, **options: Any) -> None:
        super().__init__(vocab, **options)
        if not 0 < power <= 1:
            raise OptionError("is not above 0 and at most 1.", power=power)
        self.power = float(power)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        indptr, kept = self.truncate(block)
        totals = np.repeat(block.totals, np.diff(block.indptr))
        values = (1e4 * block.counts / totals) ** self.power
        return RaggedTokens(indptr, block.genes[kept] + self.vocab.n_special, values[kept].astype(np.float32))
