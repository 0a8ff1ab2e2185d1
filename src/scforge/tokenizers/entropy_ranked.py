"""The ScDiVa tokenizer: genes ranked by expression times a weight for how well they distinguish cells.

Shapes: B cells, Z entries of all cells, G vocabulary genes.
"""

from __future__ import annotations

import numpy as np

from scforge._checks import check_choice
from scforge.data.cells import CellBlock
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers._expression import log1p_cp10k, ranked
from scforge.tokenizers.base import RaggedTokens, Tokenizer, register_tokenizer

_MIN_ENTROPY = 0.01
"""Minimum entropy in divisions, because the entropy of a gene in a single cell is 0."""


def serialization_weights(vocab: GeneVocab, weighting: str = "complement") -> np.ndarray:
    """Return the weight of each gene, which multiplies its log1p CP10K values for ranking.

    Parameters
    ----------
    vocab
        The genes, with their entropies e from 0 to 1.
    weighting
        ``"complement"``: 1 - e. ``"inverse"``: 1 / max(e, 0.01).

    Returns
    -------
    Nonnegative weights, float32, shape (G,).

    Raises
    ------
    OptionError
        If the vocabulary contains no entropies, or `weighting` is unknown.

    Examples
    --------
    >>> vocab = GeneVocab.from_genes(["MALAT1", "PPBP"]).with_entropies(np.array([1.0, 0.5]))
    >>> serialization_weights(vocab).tolist(), serialization_weights(vocab, "inverse").tolist()
    ([0.0, 0.5], [1.0, 2.0])
    """
    check_choice("weighting", weighting, ["complement", "inverse"])
    if vocab.entropies is None:
        raise OptionError("the vocabulary has no entropies; add them with scforge.data.statistics.measure_entropies.")
    if weighting == "complement":
        return (1.0 - vocab.entropies).astype(np.float32)
    return (1.0 / np.maximum(vocab.entropies, _MIN_ENTROPY)).astype(np.float32)


@register_tokenizer("entropy_ranked")
class EntropyRankedTokenizer(Tokenizer):
    """Rank the expressed genes of a cell by log1p CP10K times a weight, which is low for housekeeping genes.

    The weight is computed from the normalized Shannon entropy of the gene over cells (see
    ``scforge.data.statistics.measure_entropies``), so that genes that distinguish cells come first, as in ScDiVa
    (arXiv:2602.03477); the formula is specific to scforge. ``values`` are log1p CP10K. Value, weight and their product
    are float32, and ties are in vocabulary order, so a model can compute the same order from a dense cell.

    The positions of two genes contain information about their weights, so masking moves masked tokens to the end (see
    :class:`~scforge.tokenizers.Masking`).

    Parameters
    ----------
    vocab
        The genes, with their `entropies`.
    max_len
        Maximum number of tokens per cell, including special tokens. The top of the ranking is kept. If None, keeps all
        expressed genes.
    append_cls, append_eos
        Whether to add a CLS token before the genes, and an EOS token after them.
    weighting
        See :func:`~scforge.tokenizers.entropy_ranked.serialization_weights`.

    Raises
    ------
    OptionError
        If the vocabulary contains no entropies, or an option is invalid.

    Examples
    --------
    >>> from scipy.sparse import csr_matrix
    >>> vocab = GeneVocab.from_genes(["MALAT1", "CD3D", "PPBP"]).with_entropies(np.array([0.99, 0.8, 0.5]))
    >>> batch = EntropyRankedTokenizer(vocab)(csr_matrix([[90, 5, 5]]))
    >>> vocab.decode(batch["input_ids"][0]), batch["values"].round(decimals=1).tolist()
    (['PPBP', 'CD3D', 'MALAT1'], [[6.199999809265137, 6.199999809265137, 9.100000381469727]])
    """

    default_max_len = None
    needs_entropies = True
    ordered_by_gene = True
    ranks = True

    def __init__(
        self,
        vocab: GeneVocab,
        *,
        max_len: int | None = None,
        append_cls: bool = False,
        append_eos: bool = False,
        weighting: str = "complement",
    ) -> None:
        super().__init__(vocab, max_len=max_len, append_cls=append_cls, append_eos=append_eos)
        self._weights = serialization_weights(vocab, weighting)
        self.weighting = weighting

    @classmethod
    def special_tokens(cls, options: dict[str, object]) -> tuple[str, ...]:
        """Return the special tokens that a tokenizer with these options needs in its vocabulary."""
        return super().special_tokens({"append_cls": False} | options)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        values = log1p_cp10k(block)
        n_special = self.vocab.n_special
        return RaggedTokens(*ranked(block, values, self._weights, values, self.most_genes, n_special))
