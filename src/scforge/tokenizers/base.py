"""What a tokenizer is, and the batch it makes.

Shapes: B cells, S tokens of the longest cell of the batch, Z tokens of all cells together.
"""

from __future__ import annotations

import inspect
import numbers
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, NotRequired, TypedDict

import numba
import numpy as np
import torch
from scipy import sparse

from scforge._constants import CLS_ID, N_SPECIAL, PAD_ID, TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError

__all__ = ["RaggedTokens", "TokenBatch", "Tokenizer", "pad"]


class TokenBatch(TypedDict):
    """A batch of tokenised cells: the keyword arguments of a model's ``forward`` and ``encode``.

    ``input_ids``
        Token ids, int64, shape (B, S); PAD (0) behind the last token of a cell.
    ``attention_mask``
        True for tokens, False for padding, bool, shape (B, S).
    ``values``
        Expression value of each token, float32, shape (B, S); 0 at special tokens, padding and masked positions.
    ``labels``
        Token ids to predict, int64, shape (B, S); -100 where there is nothing to predict. Made by masking alone.
    ``masked_positions``
        True where a token was chosen for prediction, bool, shape (B, S). Made by masking alone.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    values: torch.Tensor
    labels: NotRequired[torch.Tensor]
    masked_positions: NotRequired[torch.Tensor]


class RaggedTokens(NamedTuple):
    """Tokens of several cells one after the other, without padding.

    ``indptr``: int64, shape (B + 1,); ``ids``: int32, shape (Z,); ``values``: float32, shape (Z,).
    """

    indptr: np.ndarray
    ids: np.ndarray
    values: np.ndarray


class Tokenizer(ABC):
    """Turns counts into tokens, vectorised over a block of cells.

    A subclass implements :meth:`_tokenize` and is registered with :func:`~scforge.tokenizers.register_tokenizer`.

    Parameters
    ----------
    vocab
        The genes, and what is known of them.
    max_len
        Most tokens of a cell, CLS included; the most expressed genes are kept (by the order of the strategy). None
        takes the strategy's default.
    append_cls
        Put a CLS token before the genes of each cell.
    """

    default_max_len: int | None = 2048
    ordered_by_gene: bool = False
    """Whether tokens stand in the order of the vocabulary, so that the neighbours of a token tell which gene it is."""
    needs_medians: bool = False
    """Whether the strategy uses the medians of the vocabulary."""

    def __init__(self, vocab: GeneVocab, *, max_len: int | None = None, append_cls: bool = True) -> None:
        self.vocab = vocab
        if max_len is not None and not isinstance(max_len, numbers.Integral):
            raise OptionError(f"max_len={max_len!r} is not a whole number of tokens.")
        self.max_len = self.default_max_len if max_len is None else int(max_len)
        self.append_cls = bool(append_cls)
        if self.max_len is not None and self.max_len <= self.append_cls:
            raise OptionError(f"max_len={max_len} leaves no room for a gene; give the number of tokens of a cell.")

    @abstractmethod
    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        """Return the gene tokens of each cell, in order, at most `most_genes` a cell, without special tokens."""

    @property
    def most_genes(self) -> int:
        """Most genes of a cell that become tokens."""
        return np.iinfo(np.int64).max if self.max_len is None else self.max_len - self.append_cls

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options of the constructor."""
        names: dict[str, None] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base) and base is not object:
                parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
                names |= {p.name: None for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return list(names)

    def config(self) -> dict[str, Any]:
        """Options that make this tokenizer again, JSON-safe; the vocabulary is kept beside them."""
        return {name: getattr(self, name) for name in self.option_names()}

    def ragged(self, block: CellBlock) -> RaggedTokens:
        """Tokenise a block without padding, special tokens included."""
        tokens = self._tokenize(block)
        if not self.append_cls:
            return tokens
        return RaggedTokens(*_prepend(tokens.indptr, tokens.ids, tokens.values, CLS_ID))

    def lengths(self, n_expressed: np.ndarray) -> np.ndarray:
        """Return the number of tokens of cells with `n_expressed` expressed genes."""
        return np.minimum(n_expressed, self.most_genes) + int(self.append_cls)

    def max_tokens(self) -> int:
        """Return the largest number of tokens that a cell can have."""
        return int(self.lengths(np.array([self.vocab.n_genes]))[0])

    def __call__(self, cells: CellBlock | sparse.csr_matrix, totals: np.ndarray | None = None) -> TokenBatch:
        """Tokenise cells, padded to the longest.

        Parameters
        ----------
        cells
            A block, or counts over the genes of the vocabulary as a CSR matrix of shape (B, n_genes).
        totals
            Library size of each cell, shape (B,), where `cells` is a matrix; its row sums if not given.
        """
        if isinstance(cells, CellBlock):
            return pad(self.ragged(cells))
        if cells.shape[1] != self.vocab.n_genes:
            raise DataError(
                f"cells has {cells.shape[1]} columns but the vocabulary {self.vocab.n_genes} genes; "
                "map the genes with scforge.data.open_cells first."
            )
        return pad(self.ragged(CellBlock.from_csr(cells, totals)))

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({options})"


def pad(tokens: RaggedTokens) -> TokenBatch:
    """Pad ragged tokens to the longest cell (at least one position)."""
    ids, mask, values = _pad(tokens.indptr, tokens.ids, tokens.values, PAD_ID)
    return TokenBatch(
        input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), values=torch.from_numpy(values)
    )


@numba.njit(cache=True)
def _prepend(indptr, ids, values, token):
    n_cells = len(indptr) - 1
    out_ids = np.empty(len(ids) + n_cells, dtype=np.int32)
    out_values = np.empty(len(ids) + n_cells, dtype=np.float32)
    out_indptr = indptr + np.arange(n_cells + 1)
    for cell in range(n_cells):
        start, shift = indptr[cell], cell + 1
        out_ids[start + cell] = token
        out_values[start + cell] = 0.0
        for entry in range(start, indptr[cell + 1]):
            out_ids[entry + shift] = ids[entry]
            out_values[entry + shift] = values[entry]
    return out_indptr, out_ids, out_values


@numba.njit(cache=True)
def _pad(indptr, ids, values, pad_id):
    n_cells = len(indptr) - 1
    longest = 1
    for cell in range(n_cells):
        longest = max(longest, indptr[cell + 1] - indptr[cell])
    out_ids = np.full((n_cells, longest), pad_id, dtype=np.int64)
    out_mask = np.zeros((n_cells, longest), dtype=np.bool_)
    out_values = np.zeros((n_cells, longest), dtype=np.float32)
    for cell in range(n_cells):
        for entry in range(indptr[cell], indptr[cell + 1]):
            position = entry - indptr[cell]
            out_ids[cell, position] = ids[entry]
            out_mask[cell, position] = True
            out_values[cell, position] = values[entry]
    return out_ids, out_mask, out_values


@numba.njit(cache=True)
def log1p_cp10k(indptr, counts, totals):
    """Return ``log1p(count / total * 1e4)`` of each entry, float32."""
    values = np.empty(len(counts), dtype=np.float32)
    for cell in range(len(indptr) - 1):
        scale = TARGET_SUM / max(totals[cell], 1.0)  # a cell without counts has no entry to scale
        for entry in range(indptr[cell], indptr[cell + 1]):
            values[entry] = np.log1p(counts[entry] * scale)
    return values


@numba.njit(cache=True)
def take_highest(indptr, genes, values, keys, most, by_rank):
    """Return the `most` entries with the highest key of each cell, ties by gene; by rank, or else in gene order."""
    n_cells = len(indptr) - 1
    out_indptr = np.zeros(n_cells + 1, dtype=np.int64)
    for cell in range(n_cells):
        out_indptr[cell + 1] = out_indptr[cell] + min(indptr[cell + 1] - indptr[cell], most)
    out_ids = np.empty(out_indptr[-1], dtype=np.int32)
    out_values = np.empty(out_indptr[-1], dtype=np.float32)
    for cell in range(n_cells):
        start, stop = indptr[cell], indptr[cell + 1]
        size = out_indptr[cell + 1] - out_indptr[cell]
        if size < stop - start or by_rank:
            # Genes ascend within a cell, so a stable sort breaks ties by gene.
            order = np.argsort(-keys[start:stop], kind="mergesort")[:size]
            if not by_rank:
                order = np.sort(order)
        else:
            order = np.arange(size)
        for position in range(size):
            entry = start + order[position]
            out_ids[out_indptr[cell] + position] = genes[entry] + N_SPECIAL
            out_values[out_indptr[cell] + position] = values[entry]
    return out_indptr, out_ids, out_values
